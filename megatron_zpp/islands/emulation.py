"""Islands without ranks: one process trains all of them in turn, and computes their outer steps to the bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp import Traffic, ZeroPPInterface

from .config import IslandConfig
from .hops import IslandHops
from .outer_state import trainable_parameters
from .outer_sync import Fragment, OuterSync, split_into_fragments


def emulate_islands(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    config: IslandConfig,
    zeropps: Sequence[ZeroPPInterface],
) -> OuterSync:
    """Synchronize ``models``, one of each island with its own optimizer, as ``apply_islands`` would, to the bit.

    Optimizers step in turn, and the last one's step ends that of all islands; without optimizers the loop calls
    ``count_step`` after all have stepped. zeropps: of each model's emulated ranks. Raises ValueError for one island.
    """
    if len(models) == 1:
        raise ValueError("one island has no other to synchronize with: give the models of several")
    traffic = Traffic()
    divided = [split_into_fragments(trainable_parameters(model), config.fragments) for model in models]
    fragments = [EmulatedFragment(islands, config, zeropps[0], traffic) for islands in zip(*divided, strict=True)]
    optimizer = optimizers[-1] if optimizers else None
    return OuterSync(config, len(models), fragments, traffic, optimizer, zeropps=zeropps)


class EmulatedFragment(Fragment):
    """A fragment of all ranks of all islands; compare RankFragment."""

    def __init__(
        self,
        islands: Sequence[Mapping[str, nn.Parameter]],
        config: IslandConfig,
        zeropp: ZeroPPInterface,
        traffic: Traffic,
    ) -> None:
        """zeropp: of the first island; all are sharded alike."""
        super().__init__(islands, config)
        self._ranks = zeropp.ranks
        shards = self._shards(islands[0])
        # [K][R]
        self._hops = [[IslandHops(s, len(islands), config, traffic, zeropp.device) for s in shards] for _ in islands]
        self.hops = dict(enumerate(hops for island in self._hops for hops in island))

    def start(self, step: int, is_left_out: bool = False) -> bool:
        wires = []
        for island, parameters in zip(self._hops, self.islands, strict=True):
            shards = self._shards(dict(zip(parameters, self.outer.differences(parameters), strict=True)))
            wires.append([hops.encode_pieces([*s.values()]) for hops, s in zip(island, shards, strict=True)])
        for number, island in enumerate(self._hops):
            for rank, hops in enumerate(island):
                hops.launch(torch.stack([sent[rank][number] for sent in wires]))  # uint8 [K, nbytes]
        return True

    def start_second_hop(self) -> None:
        for islands in zip(*self._hops, strict=True):  # one rank's hops in each
            mean = torch.stack([hops.encode_mean(hops.take()) for hops in islands])
            for hops in islands:
                hops.launch(mean)

    def receive_mean(self) -> list[Tensor]:
        wires = [[hops.take() for hops in island] for island in self._hops]  # the same bytes in all islands
        ranks = [hops.decode_mean(wire) for hops, wire in zip(self._hops[0], wires[0], strict=True)]
        return [torch.cat(shards) for shards in zip(*ranks, strict=True)]

    def start_alike(self) -> None:
        for parameters in self.islands:
            for name, parameter in parameters.items():
                parameter.copy_(self.islands[0][name])

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors' shards on each rank of an island."""
        shards = {name: self._ranks.shards_of(tensor.detach()) for name, tensor in tensors.items()}
        return [{name: parts[rank] for name, parts in shards.items()} for rank in range(len(self._ranks))]
