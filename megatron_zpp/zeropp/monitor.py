"""Relative quantization errors, sampled every few steps."""

from __future__ import annotations

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

    def take(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Root-mean-square errors over root-mean-square values of all ranks since the last call; collective.

        group: None = every rank's samples are here.

        Keys: ``weights``, ``gradients/intra`` and ``gradients/inter`` over all units, and ``what/unit`` for each.
        """
        keys = sorted(self._sums)
        if not keys:
            return {}
        sums = torch.stack([self._sums[key] for key in keys])  # [K, 2]
        self._sums = {}
        if group is not None:
            dist.all_reduce(sums, group=group)
        errors: dict[str, float] = {}
        for what in sorted({what for what, _ in keys}):
            rows = [i for i, key in enumerate(keys) if key[0] == what]
            errors[what] = _ratio(sums[rows].sum(dim=0))
            errors |= {f"{what}/{keys[i][1] or 'root'}": _ratio(sums[i]) for i in rows}
        return errors


def _ratio(error_and_value: Tensor) -> float:
    error, value = error_and_value.tolist()
    return (error / value) ** 0.5 if value else 0.0
