"""TensorBoard's events, under Megatron's keys (``--tensorboard-dir``)."""

import re
from collections.abc import Mapping
from typing import Any

from megatron_zpp.metrics.history import DASHBOARD
from megatron_zpp.metrics.writers.base import RunStart

# Megatron draws these over iterations only; every other key over consumed samples too ("KEY vs samples").
OVER_ITERATIONS_ONLY = ("iteration-time", "throughput", "mfu", "tokens", "mem-", "comm/")  # beginnings of keys


class TensorBoardWriter:
    """TensorBoard shows the later of two points at an iteration, so a run that goes back needs nothing more."""

    def __init__(self, start: RunStart) -> None:
        self._start, self._events = start, self._open(start)

    def _open(self, start: RunStart) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, and most ranks write nothing

        events: Any = SummaryWriter(start.logging.tensorboard_dir, max_queue=1000)
        for name, value in start.shown.items():
            events.add_text(name, str(value))
        lines = {key: ["Multiline", [f"{re.escape(key)}$"]] for group in DASHBOARD.values() for key in group.values()}
        charts = {group: {chart: lines[key] for chart, key in keys.items()} for group, keys in DASHBOARD.items()}
        events.add_custom_scalars(charts)  # it matches tags from their start, hence ``$``
        return events

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add the points. A failure ends the events' thread, so the next attempt begins another file."""
        events, self._events = self._events or self._open(self._start), None
        for key, value in metrics.items():
            events.add_scalar(key, value, iteration)
            if not key.startswith(OVER_ITERATIONS_ONLY):
                events.add_scalar(f"{key} vs samples", value, consumed_samples)
        self._events = events

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
