"""Elastic islands: each is a job of its own, and synchronizes with those that are there.

membership = Membership(island=2, num_islands=3, lighthouse="host:29510", secret_file="island.secret")
islands = ElasticIslands(model, optimizer, IslandConfig(sync_interval=100), membership)
islands.join()
while islands.steps < 10_000:
    ...
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp import ZeroPP

from ..config import IslandConfig
from ..hops import IslandHops
from ..outer_state import local_data, trainable_parameters
from ..outer_sync import Fragment, OuterSync
from .quorum import Membership, Quorum


class ElasticFragment(Fragment):
    """All parameters of one rank, whose hops start when their mean is needed."""

    is_in_flight = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: IslandConfig, get_mean: Callable[[], list[Tensor]]
    ) -> None:
        super().__init__([parameters], config)
        self._get_mean = get_mean

    def receive_mean(self) -> list[Tensor]:
        return self._get_mean()


class ElasticIslands(OuterSync):
    """Lets this job, one island, train ``model`` by itself, and synchronizes it with the islands that are there."""

    is_elastic = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: IslandConfig,
        membership: Membership,
        zeropp: ZeroPP | None = None,
        must_match: str = "",
        local_stats: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """Call it on all ranks of the island, whose default process group is the island's alone.

        Then fill ``outer_state()`` if you resume, call ``load_state_dict``, and ``join``.

        optimizer, zeropp: as for ``apply_islands``. must_match: what else all islands must have in common, such as a
        description of their data; others are refused. local_stats: numbers that this island sends to the others at each
        synchronization, such as its loss; ``gathered_stats`` has those of all. Raises ValueError if a synchronization
        would take several steps.
        """
        if config.fragments > 1 or config.sync_delay:
            raise ValueError("elastic islands require fragments 1 and sync_delay 0: nothing stays in flight")
        self.last_sync_step = 0  # the number of steps when the outer parameters were synchronized
        parameters = trainable_parameters(model)
        shapes = [(name, tuple(local_data(p).shape), str(local_data(p).dtype)) for name, p in parameters.items()]
        fingerprint = hashlib.sha256(repr((shapes, config, must_match)).encode()).hexdigest()
        self._quorum = Quorum(membership, fingerprint, lambda: self.steps, self._local_outer_state, self._take_over)
        self._local_stats = local_stats
        # The stats of each island at the last synchronization, fp64 [K, n]; zeros for one that was behind.
        self.gathered_stats: Tensor | None = None
        self._hops: tuple[str, IslandHops] | None = None  # and the name of their quorum
        self._fragment = ElasticFragment(parameters, config, lambda: self._quorum.run(self._exchange))
        # Later num_islands is how many took part in the last synchronization.
        super().__init__(config, membership.num_islands, [self._fragment], None, optimizer, model, [zeropp])
        self._is_counting = False  # until it joins, since loading an optimizer's state steps it

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step of the optimizer, and synchronize if it is due."""
        super().count_step()
        if self.steps % self.config.sync_interval == 0:
            self._note_synchronized()

    def _note_synchronized(self) -> None:
        self.last_sync_step, self.num_islands = self.steps, len(self._quorum.islands)

    def conclude(self) -> None:
        """Do nothing: elastic islands synchronize at multiples of the interval alone, where others may return."""

    @torch.no_grad()
    def join(self) -> None:
        """Wait for the others, and take over the outer parameters and their number of steps.

        All islands begin together, with the parameters of the first one. In a resume they begin with those of the
        island with the most steps. Islands that train already are joined at their next synchronization.
        """
        self._quorum.run(self._begin)()
        self._note_synchronized()
        self._fragment.copy_outer()
        self._parameters_replaced()
        self._is_counting = True

    def _begin(self) -> Callable[[], None]:
        """Exchange what joining needs, and return what applies it once all islands have got this far."""
        if not self._quorum.is_first:
            return partial(self._fragment.outer.step, self._exchange())
        return self._quorum.take_from_furthest()

    def _exchange(self) -> list[Tensor]:
        """Return the mean difference of all islands but those that are behind, which send zeros."""
        (parameters,), hops, is_behind = self._fragment.islands, self._hops_of_quorum(), self._quorum.is_behind
        differences = self._fragment.outer.differences(parameters)
        if is_behind:
            for difference in differences:
                difference.zero_()
        if self._local_stats is not None:
            stats = torch.tensor(self._local_stats(), dtype=torch.float64)
            self.gathered_stats = self._quorum.all_gather(torch.zeros_like(stats) if is_behind else stats)
        received = self._quorum.all_to_all(hops.encode_pieces(differences, self._quorum.num_ahead))
        return hops.decode_mean(self._quorum.all_gather(hops.encode_mean(received)))

    def _hops_of_quorum(self) -> IslandHops:
        """Return the hops. Their errors restart in a new quorum, whose pieces may be cut for another number."""
        if self._hops is None or self._hops[0] != self._quorum.name:
            parts = {name: local_data(parameter) for name, parameter in self._fragment.islands[0].items()}
            device = next(iter(parts.values())).device
            hops = IslandHops(parts, len(self._quorum.islands), self.config, self.traffic, device)
            self._hops = self._quorum.name, hops
        return self._hops[1]

    def _local_outer_state(self) -> dict[str, Tensor]:
        """Return this rank's part of what an island that is behind needs."""
        return {key: local_data(tensor) for key, tensor in self.outer_state().items()}

    def _take_over(self, steps: int, state: Mapping[str, Tensor]) -> None:
        """Continue at the step and outer state of the others, which are about to synchronize."""
        self.steps = steps
        for key, tensor in self._local_outer_state().items():
            tensor.copy_(state[key])
        self._fragment.copy_outer()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step of ``outer_state()``: a run resumes from its last synchronization."""
        return {"steps": torch.tensor(self.last_sync_step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned, after ``outer_state()`` is filled and before ``join``."""
        self.steps = self.last_sync_step = int(state.get("steps", 0))
        self._parameters_replaced()

    def leave(self) -> None:
        """Tell the others not to wait for this island."""
        self._quorum.leave()
