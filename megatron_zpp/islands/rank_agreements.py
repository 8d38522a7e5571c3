"""What islands of real ranks do alike, however their ranks reach each other: put agreed parameters into the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_zpp.zeropp import Traffic, ZeroPPInterface

from .agreed import held
from .agreements import Agreements, F
from .config import IslandConfig


class RankAgreements(Agreements[F]):
    """The agreements of this rank, which holds a part of one island's model, with those of the same place elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        config: IslandConfig,
        zeropp: ZeroPPInterface | None,
    ) -> None:
        self.config, self.traffic, self.steps = config, Traffic(), 0
        self._model, self._parameters, self._zeropp = model, parameters, zeropp

    @contextmanager
    def agreed_parameters(self) -> Iterator[None]:
        """Have the agreed parameters in the model in here, on all ranks, and the island's own again behind."""
        own = {name: held(parameter).clone() for name, parameter in self._parameters.items()}
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.agreed.copy_to(self._parameters)
        self._parameters_replaced()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    held(parameter).copy_(own[name])
            self._parameters_replaced()

    def _parameters_replaced(self) -> None:
        """Others are in the model, further away than an optimizer step."""
        if self._zeropp is not None:
            self._zeropp.invalidate()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # units may stay gathered after an evaluation
