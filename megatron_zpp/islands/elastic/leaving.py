"""Islands that come and go: each is a job of its own, and agrees with those that are there.

membership = Membership(island=2, num_islands=3, lighthouse="host:29510", secret_file="island.secret")
islands = apply_leaving_islands(model, optimizer, IslandConfig(sync_interval=100), membership)
islands.join()
while islands.steps < 10_000:
    ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp import Traffic, ZeroPPInterface

from ..agreed import AgreedParameters, held, trained_parameters
from ..config import IslandConfig
from ..hops import IslandHops
from ..pieces import Pieces
from ..rank_agreements import RankAgreements
from .membership import Membership
from .quorum import Quorum


def apply_leaving_islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IslandConfig,
    membership: Membership,
    zeropp: ZeroPPInterface | None = None,
    alike: str = "",
    local_stats: Callable[[], Sequence[float]] | None = None,
) -> LeavingIslands:
    """Let this job, one island, train ``model`` by itself, and agree with those others that are there.

    Call it on all ranks of the island; the default process group is the island's alone. Then fill ``agreed_state()`` if
    you resume, call ``load_state_dict``, and ``join``.

    zeropp: what ``apply_zeropp`` returned, if it was called; it is told when parameters are replaced.
    alike: what else all islands must have alike, such as a description of their data. One with another is refused.
    local_stats: numbers that this island sends to the others at each agreement, such as its loss; those of all are
        ``gathered_stats``.

    Raises ValueError where the config has an agreement last for several steps.
    """
    if config.fragments > 1 or config.sync_delay:
        raise ValueError(
            f"fragments {config.fragments} and sync_delay {config.sync_delay} leave parameters on their way, which an "
            "island that leaves would take along: islands that may leave need 1 and 0"
        )
    return LeavingIslands(model, trained_parameters(model), optimizer, config, membership, zeropp, alike, local_stats)


class LeavingFragment:
    """All parameters of one rank, and an agreement on them that is over when its start is."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: IslandConfig,
        quorum: Quorum,
        traffic: Traffic,
        local_stats: Callable[[], Sequence[float]] | None,
    ) -> None:
        self._parameters, self._config, self._quorum, self._traffic = parameters, config, quorum, traffic
        self.agreed = AgreedParameters(parameters, config)
        self._parts = {name: held(parameter) for name, parameter in parameters.items()}
        self._hops: tuple[str, IslandHops] | None = None  # and the quorum that it is for
        self._mean: list[Tensor] | None = None
        self._local_stats = local_stats
        self.gathered_stats: Tensor | None = None

    def start(self) -> None:
        """Find the mean over all that are there."""
        self._mean = self._quorum.agree(self.exchange)

    def turn(self) -> None:
        """Both hops are over."""

    def finish(self, on_mean: bool = False) -> None:
        """Agree."""
        assert self._mean is not None
        self.agreed.step(self._mean, on_mean)
        self.agreed.merge_into(self._parameters)
        self._mean = None

    @property
    def is_in_flight(self) -> bool:
        """Whether there is a mean to agree on."""
        return self._mean is not None

    def exchange(self) -> list[Tensor]:
        """The mean of the ways since the last agreement, of all but those behind, who add nothing to it."""
        hops = self._hops_of_quorum()
        differences = hops.pieces.cut(self.agreed.differences(self._parameters))
        if self._quorum.is_behind:
            differences.zero_()
        if self._local_stats is not None:
            own = torch.tensor(self._local_stats(), dtype=torch.float64)
            self.gathered_stats = self._quorum.all_gather(torch.zeros_like(own) if self._quorum.is_behind else own)
        received = self._quorum.all_to_all(hops.send(differences, of=self._quorum.num_ahead))
        return hops.receive(self._quorum.all_gather(hops.add(received)))

    def _hops_of_quorum(self) -> IslandHops:
        """With other islands, errors start again: they belong to pieces cut for that number of islands."""
        if self._hops is None or self._hops[0] != self._quorum.name:
            pieces = Pieces(self._parts, len(self._quorum.islands))
            self._hops = self._quorum.name, IslandHops(pieces, self._config, self._traffic)
        return self._hops[1]


class LeavingIslands(RankAgreements[LeavingFragment]):
    """The agreements of this rank with those of the same place in the islands that are there."""

    may_leave = True

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        config: IslandConfig,
        membership: Membership,
        zeropp: ZeroPPInterface | None,
        alike: str,
        local_stats: Callable[[], Sequence[float]] | None,
    ) -> None:
        super().__init__(model, parameters, config, zeropp)
        self.num_islands = membership.num_islands  # that took part in the last agreement
        self.agreed_at = 0  # steps, of which the agreed parameters are
        shapes = [
            (name, tuple(held(parameter).shape), str(held(parameter).dtype)) for name, parameter in parameters.items()
        ]
        fingerprint = hashlib.sha256(repr((shapes, config, alike)).encode()).hexdigest()
        self._quorum = Quorum(membership, fingerprint, lambda: self.steps, self._held_state, self._take)
        self._fragments = [LeavingFragment(parameters, config, self._quorum, self.traffic, local_stats)]
        self._counts = False  # steps that load an optimizer's state, until it joins the others
        self._follow(optimizer)

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step of the optimizer, and agree if it is due; call it yourself where no optimizer takes it."""
        super().count_step()
        if self.steps % self.config.sync_interval == 0:
            self.agreed_at, self.num_islands = self.steps, len(self._quorum.islands)

    def conclude(self) -> None:
        """Nothing: they agree at multiples of the interval alone, where one that returns may agree, too."""

    @property
    def gathered_stats(self) -> Tensor | None:
        """The stats of each island at the last agreement, fp64 [K, n]; zeros for one that was behind."""
        return self._fragments[0].gathered_stats

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take this island's own parameters as agreed; before ``join``."""
        self._fragments[0].agreed.begin_anew(self._parameters)
        self.steps = self.agreed_at = 0
        self._parameters_replaced()

    @torch.no_grad()
    def join(self) -> None:
        """Wait for the others, and have the agreed parameters in the model and ``steps`` as they have.

        All islands begin together, with the parameters of the first one; those that resume with those of the first one
        with the most steps. Islands that train already are joined at their next agreement.
        """
        self._quorum.agree(self._begin)()
        self.agreed_at, self.num_islands = self.steps, len(self._quorum.islands)
        self._fragments[0].agreed.copy_to(self._parameters)
        self._parameters_replaced()
        self._counts = True

    def _begin(self) -> Callable[[], None]:
        """What to do when all have come so far."""
        fragment = self._fragments[0]
        if not self._quorum.is_first:
            return partial(fragment.agreed.step, fragment.exchange())
        return self._quorum.take_from_furthest()

    def _held_state(self) -> dict[str, Tensor]:
        """What another island needs to agree with this one: this rank's part."""
        return {key: held(tensor) for key, tensor in self.agreed_state().items()}

    def _take(self, steps: int, agreed: Mapping[str, Tensor]) -> None:
        """Be where the others are, who are about to agree."""
        self.steps = steps
        for key, tensor in self._held_state().items():
            tensor.copy_(agreed[key])
        self._fragments[0].agreed.copy_to(self._parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Beside ``agreed_state()``, the steps of which it is: a run begins again where islands agreed."""
        return {"steps": torch.tensor(self.agreed_at)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave, when ``agreed_state()`` is filled; before ``join``."""
        self.steps = self.agreed_at = int(state["steps"])

    def leave(self) -> None:
        """Be gone, for the others; when this island has trained enough."""
        self._quorum.leave()
