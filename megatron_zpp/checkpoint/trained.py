"""The part of a run that one process saves and loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_zpp.islands import OuterSync
from megatron_zpp.zeropp import Ranks, ZeroPPInterface, ranks_of


@dataclass(frozen=True)
class Trained:
    """The model that the ranks train, or with emulated islands that of each."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]  # of each; empty: they are not to be saved, or loaded
    zeropps: Sequence[ZeroPPInterface]  # of each; empty at ZeRO stage 0
    islands: OuterSync | None = None
    first_island: int = 0  # the first model's

    @property
    def is_one_of_several(self) -> bool:
        """Whether the checkpoint has models of other islands, too: not where each is a job with a folder of its own."""
        return self.islands is not None and not self.islands.is_elastic

    @property
    def ranks(self) -> list[Ranks]:
        """Return the ranks that this process computes for, of each model."""
        return [ranks_of(zeropp) for zeropp in self.zeropps] or [ranks_of(None)]

    @property
    def world_size(self) -> int:
        return sum(ranks.world_size for ranks in self.ranks)

    def named_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each model with the prefix of its tensors' names."""
        for island, model in enumerate(self.models, self.first_island):
            # An elastic island saves the outer parameters alone: it starts again with the others.
            yield f"island{island}.model." if self.is_one_of_several else "model.", model

    def named_optimizers(self) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
        """Yield prefix, model and optimizer. The first has the plain prefix, so that a run without islands finds it."""
        pairs = zip(self.models, self.optimizers, strict=False)
        for island, (model, optimizer) in enumerate(pairs, self.first_island):
            yield (
                f"island{island}.optimizer." if self.is_one_of_several and island > 0 else "optimizer.",
                model,
                optimizer,
            )

    def first(self) -> Trained:
        """Return the first model alone, as if there were no islands."""
        models, optimizers = self.models[:1], self.optimizers[:1]
        return dataclasses.replace(self, models=models, optimizers=optimizers, islands=None, first_island=0)
