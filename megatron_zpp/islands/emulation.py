"""Islands without ranks: one process trains all of them in turn, and computes what they would agree on, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp import Traffic, ZeroPPInterface
from megatron_zpp.zeropp.fsdp.shared import below

from .agreed import AgreedParameters, trained_parameters
from .agreements import Agreements
from .config import IslandConfig
from .hops import IslandHops
from .pieces import Pieces
from .timetable import divide


def emulate_islands(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    config: IslandConfig,
    zeropps: Sequence[ZeroPPInterface],
) -> EmulatedIslands:
    """Let ``models``, one of each island with an optimizer of its own, agree as ``apply_islands`` would have it.

    Optimizers step in turn, and the last one's step ends that of all islands; without optimizers the loop calls
    ``count_step`` when all have. zeropps: of each model's emulated ranks.
    Raises ValueError for a single island.
    """
    if len(models) == 1:
        raise ValueError("one island has no other to agree with: give the models of several")
    return EmulatedIslands([trained_parameters(model) for model in models], optimizers, config, zeropps)


class EmulatedFragment:
    """Some parameters on their way between islands; compare Fragment, which has one rank of one island."""

    def __init__(
        self,
        of_islands: Sequence[Mapping[str, nn.Parameter]],
        config: IslandConfig,
        zeropps: Sequence[ZeroPPInterface],
        traffic: Traffic,
    ) -> None:
        self._of_islands, self._ranks = of_islands, zeropps[0].ranks  # ranks of all islands hold alike
        self.agreed = AgreedParameters(of_islands[0], config)
        pieces = [Pieces(shards, len(of_islands)) for shards in self._shards(of_islands[0])]
        self.hops = [[IslandHops(of_rank, config, traffic) for of_rank in pieces] for _ in of_islands]  # [K][R]

    def start(self) -> None:
        """Each rank of each island sends the way that the island's parameters went since the last agreement."""
        wires = []
        for hops, parameters in zip(self.hops, self._of_islands, strict=True):
            differences = dict(zip(parameters, self.agreed.differences(parameters), strict=True))
            shards = self._shards(differences)
            wires.append([h.send(h.pieces.cut([*s.values()])) for h, s in zip(hops, shards, strict=True)])
        for island, hops in enumerate(self.hops):
            for rank, of_rank in enumerate(hops):
                of_rank.in_flight = torch.stack([sent[rank][island] for sent in wires])  # uint8 [K, nbytes]

    def turn(self) -> None:
        """Each rank sends on its piece of the mean."""
        for of_islands in zip(*self.hops, strict=True):  # of one rank
            mean = torch.stack([hops.add(hops.in_flight) for hops in of_islands if hops.in_flight is not None])
            for hops in of_islands:
                hops.in_flight = mean

    def finish(self, on_mean: bool = False) -> None:
        """Agree."""
        # What the ranks of one island decode: those of others get the same bytes.
        of_ranks = [hops.receive(hops.in_flight) for hops in self.hops[0] if hops.in_flight is not None]
        self.agreed.step([torch.cat(shards) for shards in zip(*of_ranks, strict=True)], on_mean)
        for hops in (hops for of_island in self.hops for hops in of_island):
            hops.in_flight = None
        for parameters in self._of_islands:
            self.agreed.merge_into(parameters)

    @property
    def is_in_flight(self) -> bool:
        return self.hops[0][0].in_flight is not None

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each rank of an island holds."""
        of_tensors = {name: self._ranks.shards_of(tensor.detach()) for name, tensor in tensors.items()}
        return [{name: shards[rank] for name, shards in of_tensors.items()} for rank in range(len(self._ranks))]


class EmulatedIslands(Agreements[EmulatedFragment]):
    """The agreements of all islands, which are in this process.

    ``islands.interface.IslandsInterface`` says in full what each method does.
    """

    def __init__(
        self,
        of_islands: Sequence[Mapping[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
        config: IslandConfig,
        zeropps: Sequence[ZeroPPInterface],
    ) -> None:
        self.config, self.traffic, self.num_islands, self.steps = config, Traffic(), len(of_islands), 0
        self._of_islands, self._zeropps = of_islands, zeropps
        divided = [divide(parameters, config.fragments) for parameters in of_islands]
        self._fragments = [
            EmulatedFragment(parts, config, zeropps, self.traffic) for parts in zip(*divided, strict=True)
        ]
        self.begin_anew()
        self._follow(optimizers[-1] if optimizers else None)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take the parameters of the first island as agreed, and have all islands begin with them."""
        for fragment in self._fragments:
            fragment.agreed.begin_anew(self._of_islands[0])
            for hops in (hops for of_island in fragment.hops for hops in of_island):
                hops.load_state_dict({})
        for parameters in self._of_islands:
            for name, parameter in parameters.items():
                parameter.copy_(self._of_islands[0][name])
        self.steps = 0
        self._parameters_replaced()

    @contextmanager
    def agreed_parameters(self) -> Iterator[None]:
        """Have the agreed parameters in all models in here, and their own again behind."""
        own = [[parameter.detach().clone() for parameter in parameters.values()] for parameters in self._of_islands]
        with torch.no_grad():
            for fragment in self._fragments:
                for parameters in self._of_islands:
                    fragment.agreed.copy_to(parameters)
        self._parameters_replaced()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameters, values in zip(self._of_islands, own, strict=True):
                    for parameter, value in zip(parameters.values(), values, strict=True):
                        parameter.copy_(value)
            self._parameters_replaced()

    def _parameters_replaced(self) -> None:
        for zeropp in self._zeropps:
            zeropp.invalidate()

    def state_dict(self) -> dict[str, Tensor]:
        """What ``Islands.state_dict`` gives on all ranks."""
        state: dict[str, Tensor] = {}
        for island, zeropp in enumerate(self._zeropps):
            for rank in range(len(zeropp.ranks)):
                prefix = f"{island * len(zeropp.ranks) + rank}."
                state[f"{prefix}steps"] = torch.tensor(self.steps)
                for number, fragment in enumerate(self._fragments):
                    own = fragment.hops[island][rank].state_dict()
                    state |= {f"{prefix}fragment{number}.{key}": value for key, value in own.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave, on as many ranks."""
        for island, zeropp in enumerate(self._zeropps):
            for rank in range(len(zeropp.ranks)):
                own = below(state, f"{island * len(zeropp.ranks) + rank}.")
                self.steps = int(own.get("steps", 0))
                for number, fragment in enumerate(self._fragments):
                    of_fragment = below(own, f"fragment{number}.")
                    fragment.hops[island][rank].load_state_dict(
                        {key: value.to(zeropp.device) for key, value in of_fragment.items()}
                    )
        self._parameters_replaced()
