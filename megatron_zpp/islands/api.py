"""Islands: groups of ranks that train by themselves, and synchronize parameters every H steps (DiLoCo).

    mesh = init_device_mesh("cuda", (num_islands, ranks_per_island), mesh_dim_names=("island", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    islands = apply_islands(model, optimizer, IslandConfig(sync_interval=100), mesh["island"])

The training loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.zeropp import Traffic, ZeroPPInterface
from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.fsdp.shared import below
from megatron_zpp.zeropp.fsdp.topology import gather_objects, process_rank

from .agreed import AgreedParameters, held, trained_parameters
from .config import IslandConfig
from .hops import IslandHops
from .pieces import Pieces
from .rank_agreements import RankAgreements
from .timetable import divide


def apply_islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IslandConfig,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    zeropp: ZeroPPInterface | None = None,
) -> Islands:
    """Let islands train ``model`` by themselves, and agree after every ``config.sync_interval`` steps of ``optimizer``.

    Call it once, on all ranks alike, when the parameters have values: all islands begin with those of the first.

    optimizer: whose steps count; None: the loop calls ``count_step`` after each of its own.
    group: the ranks that hold the same part of the model, one of each island, in the order of islands; a mesh of one
    dimension, or a process group. Default: every process is an island. What shards or replicates the model must have
    the ranks of one island alone.
    zeropp: what ``apply_zeropp`` returned, if it was called; it is told when parameters are replaced.

    Raises ValueError where there is one island, where its ranks hold other parts of the model than those of others, or
    where islands have other settings.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    group = group or dist.group.WORLD
    if group is None or group.size() == 1:
        raise ValueError("one island has no other to agree with: give the ranks of several that hold the same part")
    parameters = trained_parameters(model)
    parts = [(name, tuple(held(parameter).shape), parameter.dtype) for name, parameter in parameters.items()]
    of_islands = gather_objects((parts, config), group)
    if any(its_parts != of_islands[0][0] for its_parts, _ in of_islands):
        raise ValueError(
            "ranks of the same place in their islands hold other parameters, or other parts of them: shard the model "
            "alike in each island, with meshes of its own ranks"
        )
    if any(its_config != of_islands[0][1] for _, its_config in of_islands):
        raise ValueError(f"islands have different settings, such as {config}: give all the same IslandConfig")
    return Islands(model, parameters, optimizer, config, group, zeropp)


class Fragment:
    """Some parameters on their way between islands: of one rank, and those of its place in the other islands."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: IslandConfig, group: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        self._parameters, self._group = parameters, group
        self.agreed = AgreedParameters(parameters, config)
        parts = {name: held(parameter) for name, parameter in parameters.items()}
        self.hops = IslandHops(Pieces(parts, group.size()), config, traffic)
        self._work: dist.Work | None = None
        self._sent: Tensor | None = None  # which the collective reads until it is over

    def start(self) -> None:
        """Send the way that this rank's part of the parameters went since the last agreement."""
        differences = self.hops.pieces.cut(self.agreed.differences(self._parameters))
        wires = self.hops.send(differences.to(device_of(self._group)))
        self._sent, self.hops.in_flight = wires, torch.empty_like(wires)
        self._work = dist.all_to_all_single(self.hops.in_flight, wires, group=self._group, async_op=True)

    def turn(self) -> None:
        """Send on what has come: this rank's piece of the mean."""
        received = self.arrived()
        piece, mean = self.hops.add(received), torch.empty_like(received)
        self._sent, self.hops.in_flight = piece, mean
        self._work = all_gather(mean.view(-1), piece, group=self._group, async_op=True)

    def finish(self, on_mean: bool = False) -> None:
        """Agree."""
        self.agreed.step(self.hops.receive(self.arrived()), on_mean)
        self.agreed.merge_into(self._parameters)
        self.hops.in_flight = None

    @property
    def is_in_flight(self) -> bool:
        """Whether something is to come, or has come."""
        return self.hops.in_flight is not None

    def arrived(self) -> Tensor:
        """What is in flight, when it is here."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        assert self.hops.in_flight is not None
        return self.hops.in_flight


class Islands(RankAgreements[Fragment]):
    """The agreements of this rank with those of the same place in the other islands.

    ``islands.interface.IslandsInterface`` says in full what each method does.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        config: IslandConfig,
        group: dist.ProcessGroup,
        zeropp: ZeroPPInterface | None,
    ) -> None:
        super().__init__(model, parameters, config, zeropp)
        self.num_islands, self._group = group.size(), group
        of_fragments = divide(parameters, config.fragments)
        self._fragments = [Fragment(part, config, group, self.traffic) for part in of_fragments]
        self.begin_anew()
        self._follow(optimizer)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take the parameters of the first island as agreed, and have all islands begin with them; collective."""
        for parameter in self._parameters.values():
            values = held(parameter).to(device_of(self._group)).contiguous()
            dist.broadcast(values, group=self._group, group_src=0)
            held(parameter).copy_(values)
        for fragment in self._fragments:
            fragment.agreed.begin_anew(self._parameters)
            fragment.hops.load_state_dict({})
        self.steps = 0
        self._parameters_replaced()

    def state_dict(self) -> dict[str, Tensor]:
        """What else this rank must keep for an exact continuation; collective."""
        state = {f"{process_rank()}.steps": torch.tensor(self.steps)}
        for number, fragment in enumerate(self._fragments):
            if fragment.is_in_flight:
                fragment.arrived()
            own = fragment.hops.state_dict()
            state |= {f"{process_rank()}.fragment{number}.{key}": value for key, value in own.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave on the same rank."""
        own = below(state, f"{process_rank()}.")
        self.steps = int(own.get("steps", 0))
        for number, fragment in enumerate(self._fragments):
            of_fragment = below(own, f"fragment{number}.")
            device = device_of(self._group)
            fragment.hops.load_state_dict({key: value.to(device) for key, value in of_fragment.items()})
        self._parameters_replaced()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be that the group's ranks exchange; parameters may be offloaded to host memory."""
    # Not its one backend: a group that init_process_group() made without a name has one for each kind of device.
    takes_gpu = "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if takes_gpu else torch.device("cpu")
