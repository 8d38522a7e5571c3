"""A real rank as a training loop sees it, with the random states that dropout draws from; compare EmulatedRanks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .fsdp.collectives import all_gather
from .fsdp.shared import below
from .fsdp.topology import process_rank
from .interface import RandomStates, Ranks, ZeroPPInterface


class OwnRank:
    """This process's rank in torch's default process group; the only rank if there is none.

    gathers_over: the ranks that ``gather`` gathers from; default all.
    """

    def __init__(self, gathers_over: dist.ProcessGroup | None = None) -> None:
        self.random_states, self._gathers_over = OwnRandomStates(), gathers_over

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[AbstractContextManager[None]]:
        return iter([nullcontext()])

    def step_by_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the optimizer has only this rank's shards."""

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        if not isinstance(tensor, DTensor):
            # Whole on every rank, and rank 0 counts it. So under a pipeline, parameters must be DTensors: rank 0 would
            # not count a plain tensor of a stage that it does not run.
            return [tensor if process_rank() == 0 else tensor.new_empty(0)]
        if any([placement.is_partial() for placement in tensor.placements]):
            raise ValueError(f"a tensor of placements {tensor.placements} is not summed yet: it has no shards")
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None  # a rank holds no tensors of meshes without it
        local = tensor.to_local()
        for index, placement in zip(coordinate, tensor.placements, strict=True):
            if placement.is_replicate() and index > 0:
                return [local.new_empty(0)]  # the first replica counts
        return [local]

    def gather(self, local: Tensor) -> Tensor:
        if self.world_size == 1:
            return local
        group = self._gathers_over or dist.group.WORLD
        assert group is not None  # there are several ranks
        gathered = local.new_empty(group.size(), *local.shape[1:])
        all_gather(gathered.flatten(), local.flatten(), group=group)
        return gathered


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_of(zeropp: ZeroPPInterface | None) -> Ranks:
    """Return the ranks that this process computes for; without ZeRO++ (ZeRO stage 0) one rank."""
    return OwnRank() if zeropp is None else zeropp.ranks


class OwnRandomStates:
    """The random states of this process, which is one rank."""

    def seed(self, seed_of: Callable[[int], int]) -> None:
        torch.manual_seed(seed_of(process_rank()))

    def state_dict(self) -> dict[str, Tensor]:
        states = generator_states(has_cuda=torch.cuda.is_available())
        return {f"{process_rank()}.{device}": state for device, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        set_generator_states(below(state, f"{process_rank()}."))


@contextmanager
def unmoved(random_states: RandomStates) -> Iterator[None]:
    """Restore the random states of this process's ranks at the end of this context."""
    before = random_states.state_dict()
    try:
        yield
    finally:
        random_states.load_state_dict(before)


def generator_states(has_cuda: bool) -> dict[str, Tensor]:
    """Return the states of torch's generators by device, "cpu" and, on request, "cuda"."""
    states = {"cpu": torch.get_rng_state()}
    if has_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore what ``generator_states`` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
