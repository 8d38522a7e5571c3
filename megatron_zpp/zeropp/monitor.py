"""Relative quantization errors, sampled every few steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ErrorMonitor:
    """Sums of squared errors and squared values by (what was sent, unit). Off until ``every`` is set."""

    def __init__(self) -> None:
        self.every: int | None = None  # optimizer steps between samples
        self._sums: dict[tuple[str, str], Tensor] = {}  # fp32 [2]

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def record(self, what: str, unit: str, sent: Tensor, arrived: Tensor) -> None:
        """Add one sample. Stays on the device: no synchronization."""
        error = torch.stack([(sent.float() - arrived.float()).square().sum(), sent.float().square().sum()])
        key = (what, unit)
        self._sums[key] = self._sums[key] + error if key in self._sums else error

    def take(self, group: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Root-mean-square errors over root-mean-square values of all ranks since the last call; collective.

        ``group`` has the ranks with the same units; None = every rank's samples are here. ``pipeline`` has those with
        the model's other units.
        Keys: ``weights``, ``gradients/intra`` and ``gradients/inter`` over all units, and ``what/unit`` for each.
        """
        keys = sorted(self._sums)
        if not keys:
            return {}
        sums = torch.stack([self._sums[key] for key in keys])  # [K, 2]
        self._sums = {}
        if group is not None:
            dist.all_reduce(sums, group=group)
        if pipeline is not None:
            of_stages: list[Any] = [None] * pipeline.size()
            dist.all_gather_object(of_stages, (keys, sums.tolist()), group=pipeline)
            keys = [key for stage_keys, _ in of_stages for key in stage_keys]
            sums = torch.tensor([row for _, rows in of_stages for row in rows])
        errors: dict[str, float] = {}
        for what in sorted({what for what, _ in keys}):
            rows = [i for i, key in enumerate(keys) if key[0] == what]
            errors[what] = _ratio(sums[rows].sum(dim=0))
            errors |= {f"{what}/{keys[i][1] or 'root'}": _ratio(sums[i]) for i in rows}
        return errors


def _ratio(error_and_value: Tensor) -> float:
    error, value = error_and_value.tolist()
    return (error / value) ** 0.5 if value else 0.0
