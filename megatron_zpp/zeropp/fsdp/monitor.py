"""Statistics of what travels, sampled every few steps: docs/monitors.md says how to read them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..wire import reference
from ..wire.format import WireFormat
from .topology import gather_objects


class ErrorMonitor:
    """Two sums for each (statistic, what was sent, unit). Off until ``every`` is set."""

    def __init__(self) -> None:
        self.every: int | None = None  # optimizer steps between samples
        self._sums: dict[tuple[str, str, str], Tensor] = {}  # fp32 [2]

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    # Samples stay on the device: nothing here synchronizes.

    def record(self, what: str, unit: str, sent: Tensor, arrived: Tensor) -> None:
        """Add a sample of the relative error."""
        self._add(("error", what, unit), _square(sent.float() - arrived.float()), _square(sent))

    def record_error_state(self, what: str, unit: str, gradients: Tensor, error: Tensor) -> None:
        """Add a sample of LoCo's error, relative to the gradients that it was added to."""
        self._add(("error-state", what, unit), _square(error), _square(gradients))

    def record_codes(self, what: str, unit: str, format: WireFormat, wires: Tensor) -> None:
        """Count the largest codes, and the blocks with a NaN or Inf, in wire buffers uint8 [..., nbytes]."""
        if format.quantized:
            largest, codes, nonfinite = reference.count_codes(format, wires)
            self._add(("largest-codes", what, unit), largest, codes)
            self._add(("nonfinite-blocks", what, unit), nonfinite, torch.ones_like(nonfinite))

    def _add(self, key: tuple[str, str, str], first: Tensor, second: Tensor) -> None:
        sums = torch.stack([first, second])
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    def take(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        pipeline: dist.ProcessGroup | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
    ) -> dict[str, float]:
        """The statistics of all ranks since the last call; collective.

        ``groups`` has by unit the ranks that share it; {} = every rank's samples are here. ``pipeline`` has those with
        the model's other units, ``tensor_parallel`` those with other parts of the same ones.

        Keys: ``STATISTIC/WHAT`` over all units, and ``STATISTIC/WHAT/UNIT`` for each.
        """
        keys = sorted(self._sums)
        if not keys:
            return {}
        sums = torch.stack([self._sums[key] for key in keys])  # [K, 2]
        self._sums = {}
        for group in dict.fromkeys(groups.values()):
            rows = [i for i, (_, _, unit) in enumerate(keys) if groups[unit] is group]
            of_group = sums[rows]
            dist.all_reduce(of_group, group=group)
            sums[rows] = of_group
        if tensor_parallel is not None:
            dist.all_reduce(sums, group=tensor_parallel)
        if pipeline is not None:
            of_stages = gather_objects((keys, sums.tolist()), pipeline)
            keys = [key for stage_keys, _ in of_stages for key in stage_keys]
            sums = torch.tensor([row for _, rows in of_stages for row in rows])
        sums = sums.cpu()
        values: dict[str, float] = {}
        for statistic, what in sorted({key[:2] for key in keys}):
            rows = [i for i, key in enumerate(keys) if key[:2] == (statistic, what)]
            values[f"{statistic}/{what}"] = _value(statistic, sums[rows].sum(dim=0))
            values |= {f"{statistic}/{what}/{keys[i][2] or 'root'}": _value(statistic, sums[i]) for i in rows}
        return values


def _square(values: Tensor) -> Tensor:
    return values.float().square().sum()


def _value(statistic: str, sums: Tensor) -> float:
    first, second = sums.tolist()
    if statistic == "nonfinite-blocks":
        return first
    ratio = first / second if second else 0.0
    return ratio if statistic == "largest-codes" else ratio**0.5
