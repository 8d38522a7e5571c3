"""Statistics of what is sent, sampled every few steps; docs/reference/monitors.md says how to read them.

Each unit has two sums for each (statistic, what was sent). They stay on the device: only ``gather_samples`` waits.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..wire import reference
from ..wire.format import WireFormat
from .fsdp_unit import FSDPUnit
from .topology import gather_objects


def record_error(unit: FSDPUnit, what: str, sent: Tensor, arrived: Tensor) -> None:
    """Add a sample of the relative error."""
    _add(unit, ("error", what), _square(sent.float() - arrived.float()), _square(sent))


def record_error_state(unit: FSDPUnit, what: str, gradients: Tensor, error: Tensor) -> None:
    """Add a sample of LoCo's error, relative to the gradients that it was added to."""
    _add(unit, ("error-state", what), _square(error), _square(gradients))


def record_codes(unit: FSDPUnit, what: str, format: WireFormat, wires: Tensor) -> None:
    """Count the largest codes, and the blocks with a NaN or Inf, in wire buffers uint8 [..., nbytes]."""
    if format.quantized:
        largest, codes, nonfinite = reference.count_codes(format, wires)
        _add(unit, ("largest-codes", what), largest, codes)
        _add(unit, ("nonfinite-blocks", what), nonfinite, torch.ones_like(nonfinite))


def gather_samples(
    units: Sequence[FSDPUnit], pipeline: dist.ProcessGroup | None, tensor_parallel: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the statistics of all ranks since the last call, as ``ZeroPP.quantization_errors`` does. Collective.

    pipeline: the ranks with the model's other units. tensor_parallel: the ranks with other parts of the same units.
    """
    rows = [(*key, unit, sums) for unit in units for key, sums in sorted(unit.samples.items())]
    keys = [(statistic, what, unit.name) for statistic, what, unit, _ in rows]
    if not keys and pipeline is None:
        return {}
    sums = torch.stack([sums for *_, sums in rows]) if keys else torch.zeros(0, 2)  # [K, 2]
    groups = [unit.topology.group for _, _, unit, _ in rows]
    for group in dict.fromkeys(groups):
        of_group = [i for i, other in enumerate(groups) if other is group]
        group_sums = sums[of_group]
        dist.all_reduce(group_sums, group=group)
        sums[of_group] = group_sums
    if tensor_parallel is not None and keys:
        dist.all_reduce(sums, group=tensor_parallel)
    if pipeline is not None:
        stages = gather_objects((keys, sums.tolist()), pipeline)
        keys = [key for stage_keys, _ in stages for key in stage_keys]
        sums = torch.tensor([row for _, stage_sums in stages for row in stage_sums])
    for unit in units:
        unit.samples.clear()
    sums = sums.cpu()
    values: dict[str, float] = {}
    for statistic, what in sorted({key[:2] for key in keys}):
        found = [i for i, key in enumerate(keys) if key[:2] == (statistic, what)]
        values[f"{statistic}/{what}"] = _value(statistic, sums[found].sum(dim=0))
        values |= {f"{statistic}/{what}/{keys[i][2] or 'root'}": _value(statistic, sums[i]) for i in found}
    return values


def _add(unit: FSDPUnit, key: tuple[str, str], first: Tensor, second: Tensor) -> None:
    sums = torch.stack([first, second])
    unit.samples[key] = unit.samples[key] + sums if key in unit.samples else sums


def _square(values: Tensor) -> Tensor:
    return values.float().square().sum()


def _value(statistic: str, sums: Tensor) -> float:
    first, second = sums.tolist()
    if statistic == "nonfinite-blocks":
        return first
    ratio = first / second if second else 0.0
    return ratio if statistic == "largest-codes" else ratio**0.5
