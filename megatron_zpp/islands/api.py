"""Islands: groups of ranks that train by themselves, and synchronize parameters every H steps (DiLoCo).

    mesh = init_device_mesh("cuda", (num_islands, ranks_per_island), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    islands = apply_islands(model, optimizer, IslandConfig(sync_interval=100), mesh["island"])

The training loop stays as it is.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.zeropp import Traffic, ZeroPP
from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.fsdp.topology import gather_objects, process_rank

from .config import IslandConfig
from .hops import IslandHops
from .outer_state import MAX_VALUE, are_sound, local_data, trainable_parameters
from .outer_sync import Fragment, OuterSync, split_into_fragments


def apply_islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IslandConfig,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    zeropp: ZeroPP | None = None,
) -> OuterSync:
    """Let islands train ``model`` by themselves, and synchronize it every ``config.sync_interval`` optimizer steps.

    Call it once, on all ranks alike, when the parameters have values: all islands start from those of the first.

    optimizer: whose steps count; None: the loop calls ``count_step`` after each of its own.
    group: the ranks that hold the same part of the model, one of each island, in the order of islands; a mesh of one
    dimension, or a process group. Default: every process is an island. Shard or replicate the model over the ranks of
    one island alone.
    zeropp: what ``apply_zeropp`` returned, if it was called; it must learn when parameters are replaced.

    Raises ValueError if there is one island, if its ranks hold other parts of the model than those of other islands, if
    islands have different settings, or if the first one's parameters hold NaN, Inf or numbers beyond 1e20.
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
    traffic = Traffic()
    divided = split_into_fragments(parameters, config.fragments)
    fragments = [RankFragment(part, config, group, traffic, parameters) for part in divided]
    return OuterSync(config, group.size(), fragments, traffic, optimizer, model, [zeropp])


class RankFragment(Fragment):
    """A fragment of one rank, exchanged with the ranks of the same place in the other islands."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: IslandConfig,
        group: dist.ProcessGroup,
        traffic: Traffic,
        all_parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """all_parameters: of this rank, in all fragments; an island contributes where all of them are sound."""
        super().__init__([parameters], config)
        self._group, self._device, self._all_parameters = group, device_of(group), all_parameters
        parts = {name: local_data(parameter) for name, parameter in parameters.items()}
        self._hops = IslandHops(parts, group.size(), config, traffic, self._device)
        self.hops[process_rank()] = self._hops

    def start(self, step: int, is_left_out: bool = False) -> bool:
        differences = self.outer.differences(self.islands[0])
        present = self._sound_islands(differences, is_left_out)
        is_present = present[self._group.rank()]
        if dist.get_rank() == 0 and not all(present):
            left_out = ", ".join(str(island) for island, is_sound in enumerate(present) if not is_sound)
            where = f"in the parameters of island {left_out} after step {step}"
            those = f"{sum(present)} of {len(present)} islands synchronize, and what is left out goes on from there"
            print(f"note: NaN, Inf or a number beyond {MAX_VALUE:g} is {where}: {those}", flush=True)
        sent = self._hops.encode_pieces(differences, max(1, sum(present)), is_present)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        self._hops.launch(received, (work, sent))
        return is_present

    def _sound_islands(self, differences: Sequence[Tensor] = (), is_left_out: bool = False) -> list[bool]:
        """Return for each island whether all its ranks are sound and not left out. Collective over all ranks."""
        local = [local_data(parameter) for parameter in self._all_parameters.values()]
        unsound = torch.zeros(self._group.size(), device=self._device)
        unsound[self._group.rank()] = is_left_out or not (are_sound(local) and are_sound(differences))
        dist.all_reduce(unsound)
        return [count == 0 for count in unsound.tolist()]

    def start_second_hop(self) -> None:
        received = self._hops.take()
        sent, mean = self._hops.encode_mean(received), torch.empty_like(received)
        work = all_gather(mean.view(-1), sent, group=self._group, async_op=True)
        self._hops.launch(mean, (work, sent))

    def receive_mean(self) -> list[Tensor]:
        return self._hops.decode_mean(self._hops.take())

    def start_alike(self) -> None:
        if not self._sound_islands()[0]:
            wrong = f"NaN, Inf or a number beyond {MAX_VALUE:g} is in the parameters of the first island"
            raise ValueError(f"{wrong}, with which all islands start: load other weights")
        for parameter in self.islands[0].values():
            values = local_data(parameter).to(self._device).contiguous()
            dist.broadcast(values, group=self._group, group_src=0)
            local_data(parameter).copy_(values)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors that the group's ranks exchange; parameters may be offloaded to host memory."""
    # Not its one backend: a group that init_process_group() made without a name has one for each kind of device.
    takes_gpu = "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if takes_gpu else torch.device("cpu")
