"""Islands: groups of ranks that train by themselves, and synchronize parameters every H steps (DiLoCo).

    mesh = init_device_mesh("cuda", (num_islands, ranks_per_island), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    islands = apply_islands(model, optimizer, IslandConfig(sync_interval=100), mesh["island"])

The training loop stays as it is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.zeropp import Traffic, ZeroPP
from megatron_zpp.zeropp.fsdp.topology import gather_objects

from .config import IslandConfig
from .fragment import Fragment, split_into_fragments
from .outer_state import local_data, trainable_parameters
from .outer_sync import OuterSync


def apply_islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IslandConfig,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    zeropp: ZeroPP | None = None,
    *,
    counts_by_hook: bool = True,
) -> OuterSync:
    """Let islands train ``model`` by themselves, and synchronize it every ``config.sync_interval`` optimizer steps.

    Call it once, on all ranks, when the parameters have values: all islands start from the first one's.

    optimizer: counts its steps by a hook, and restarts where this island takes over the others' parameters. None, or
    ``counts_by_hook`` False: the loop calls ``after_step`` after each of its steps.
    group: the ranks that hold the same part of the model, one of each island, in the order of islands; a mesh of one
    dimension, or a process group. Default: every process is an island. Shard or replicate the model over the ranks of
    one island alone.
    zeropp: what ``apply_zeropp`` returned, if it was called; it must learn when parameters are replaced.

    Raises ValueError if there is one island, if its ranks hold other parts of the model than the ranks of other
    islands, if islands have different settings, or if the first one's parameters hold NaN, Inf or numbers beyond 1e20.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    group = group or dist.group.WORLD
    if group is None or group.size() == 1:
        raise ValueError("one island has no other to synchronize with: give the ranks of several with the same part")
    parameters = trainable_parameters(model)
    parts = [(name, tuple(local_data(parameter).shape), parameter.dtype) for name, parameter in parameters.items()]
    all_parts, configs = zip(*gather_objects((parts, config), group), strict=True)
    if any(parts != all_parts[0] for parts in all_parts):
        raise ValueError("ranks of the same place in their islands hold other parameters: shard the model alike")
    if any(config != configs[0] for config in configs):
        raise ValueError(f"islands have different settings, such as {config}: give all the same IslandConfig")
    traffic = Traffic() if zeropp is None else zeropp.traffic
    divided = split_into_fragments(parameters, config.fragments)
    fragments = [Fragment(part, config, group, traffic, parameters) for part in divided]
    islands = OuterSync(config, group, fragments, traffic, optimizer, model, zeropp)
    if optimizer is not None and counts_by_hook:
        islands.count_by_hook(optimizer)
    return islands
