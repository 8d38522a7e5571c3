"""Islands: groups of ranks that train by themselves, and synchronize parameters every H steps (DiLoCo)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.zeropp import ZeroPP

from .config import IslandConfig
from .outer_sync import OuterSync


def apply_islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IslandConfig,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    zeropp: ZeroPP | None = None,
) -> OuterSync:
    """Let islands train ``model`` by themselves, and synchronize it every ``config.sync_interval`` optimizer steps.

    Call it once, on all ranks, when the parameters have values: all islands start from the first one's.

    optimizer: a hook counts its steps, and it restarts where this island takes over the others' parameters. None: the
    loop calls ``after_step`` after each of its steps.
    group: the ranks that hold the same part of the model, one of each island in order: a 1-D mesh or a process group.
    Default: every process is an island. Shard or replicate the model over the ranks of one island alone.
    zeropp: what ``apply_zeropp`` returned, if it was called; it must learn when parameters are replaced.

    Raises ValueError if there is one island, if its ranks hold other parts of the model than the ranks of other
    islands, if islands have different settings, or if the first one's parameters hold NaN, Inf or numbers beyond 1e20.
    """
    group = group.get_group() if isinstance(group, DeviceMesh) else group or dist.group.WORLD
    if group is None or group.size() == 1:
        raise ValueError("one island has no other to synchronize with: give the ranks of several with the same part")
    islands = OuterSync(model, optimizer, config, group, zeropp)
    if optimizer is not None:
        islands.count_by_hook(optimizer)
    return islands
