"""Read back metrics.jsonl of runs; the charts of TensorBoard, wandb reports and tools/report.py."""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.files import regular_file

METRICS, SCHEMA = "metrics.jsonl", 1  # docs/reference/log.md
_START: dict[str, Any] = {"iteration": int | None, "settings": dict, "program": dict}  # what each line has
_POINT: dict[str, Any] = {"iteration": int, "samples": int, "time": int | float}
Points = dict[int, float]  # value by iteration, in order
Curve = list[tuple[float, float]]
DASHBOARD = {  # group: chart: key
    "Loss": {"training loss": "lm loss", "validation loss": "lm loss validation"},
    "Throughput": {
        "tokens per second": "tokens-per-second",
        "model FLOPs utilization": "mfu",
        "TFLOP/s per GPU": "throughput",
    },
    "Communication": {
        "bytes between nodes per step": "comm/bytes-between-nodes",
        "bytes within nodes per step": "comm/bytes-within-nodes",
        "seconds waited for links between nodes, per step": "comm/seconds-waited-between-nodes",
        "seconds waited for links within nodes, per step": "comm/seconds-waited-within-nodes",
    },
    "Quantization error": {
        "relative error of weights": "comm/error/weights",
        "relative error of gradients within nodes": "comm/error/gradients/intra",
        "relative error of gradients between nodes": "comm/error/gradients/inter",
        "LoCo's error over gradients, between nodes": "comm/error-state/gradients/inter",
        "share of largest codes, gradients between nodes": "comm/largest-codes/gradients/inter",
        "blocks with NaN or Inf, gradients between nodes": "comm/nonfinite-blocks/gradients/inter",
    },
}
AXES = ("iteration", "tokens", "time", "bytes sent between nodes")


@dataclass
class RunHistory:
    """One run's settings and metrics, as its newest curve: without the points that it went back behind."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Points] = field(default_factory=dict)  # by key, see docs/reference/log.md
    samples: Points = field(default_factory=dict)  # consumed by each iteration that has a loss
    seconds: Points = field(default_factory=dict)  # since the first loss, without the time between a stop and a resume
    begin: int = 0  # the iteration that its first start went on from

    def curve(self, key: str, axis: str) -> Curve:
        """Return (place on one of ``AXES``, value) of each point of a key that has a place there."""
        points, length = self.metrics.get(key, {}), int(self.settings.get("seq_length", 0))
        places = {
            "iteration": {i: float(i) for i in points},
            "tokens": {i: samples * length for i, samples in self.samples.items() if length},
            "time": self.seconds,
            "bytes sent between nodes": self.sum_so_far("comm/bytes-between-nodes"),
        }[axis]
        return [(places[i], value) for i, value in points.items() if i in places]

    def sum_so_far(self, key: str) -> Points:
        """Sum up a key, such as bytes per step, whose points are means over the steps since the point before."""
        total, last, sums = 0.0, self.begin, {}
        for iteration, value in self.metrics.get(key, {}).items():
            total += value * (iteration - last)
            sums[iteration], last = total, iteration
        return sums

    def mean(self, key: str) -> float:
        """Average such a key over the steps; NaN without a point."""
        sums = self.sum_so_far(key)
        return sums[last] / (last - self.begin) if (last := max(sums, default=0)) > self.begin else math.nan

    def last(self, key: str) -> float:
        """Return a key's last value; NaN without one."""
        return next(reversed(self.metrics.get(key, {}).values()), math.nan)

    @property
    def tokens_per_second(self) -> float:
        """The median rate without the first point, which includes warming up; NaN without a point."""
        rates = [*self.metrics.get("tokens-per-second", {}).values()]
        return statistics.median(rates[1:] or rates) if rates else math.nan

    def points_until(self, last: int) -> Iterator[tuple[dict[str, float], int, int]]:
        """Yield the metrics, the iteration and the consumed samples of each training step up to ``last``."""
        for i, samples in self.samples.items():
            if i <= last:
                yield {key: points[i] for key, points in self.metrics.items() if i in points}, i, int(samples)


def find_runs(folders: list[Path]) -> dict[str, Path]:
    """Return the metrics.jsonl of each folder that holds one, by folder. Raises ValueError if there is none."""
    runs: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        found = sorted(folder.rglob(METRICS))
        if not found:
            none = f"{folder} holds no {METRICS}: give a run's --metrics-dir, --tensorboard-dir or --save"
            older = ". TensorBoard shows the events in it, which an older version wrote"
            raise ValueError(none + older * any(folder.rglob("*tfevents*")))
        runs |= {str(path.parent): path for path in found}
    return runs


def read_run(name: str, path: Path) -> RunHistory:
    """Read a run. A later start replaces what an earlier one wrote beyond its iteration. Raises ValueError."""
    run, begun = RunHistory(name), None
    for record in _records(path):
        iteration = record["iteration"]
        if "schema" in record:
            if iteration is not None or not run.settings:  # an evaluation alone leaves the training as it is
                run.settings = record["settings"] | record["program"]  # the vocabulary is null in settings
            for points in (run.samples, run.seconds, *run.metrics.values()) if iteration is not None else ():
                for beyond in [i for i in points if i > iteration]:
                    del points[beyond]
            run.begin = run.begin if run.samples else iteration or 0
            begun = None
            continue
        if "lm loss" in record:
            begun = record["time"] - max(run.seconds.values(), default=0.0) if begun is None else begun
            run.samples[iteration], run.seconds[iteration] = record["samples"], record["time"] - begun
        for key in record.keys() - {"iteration", "samples", "time"}:
            run.metrics.setdefault(key, {})[iteration] = math.nan if record[key] is None else record[key]
    run.metrics = {key: dict(sorted(points.items())) for key, points in run.metrics.items() if points}
    return run


def read_training(name: str, path: Path) -> RunHistory:
    """Read a run that has trained. Raises ValueError if it made no step."""
    run = read_run(name, path)
    if "lm loss" not in run.metrics:
        raise ValueError(f"{name} holds no training losses: did its run make a step?")
    return run


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's records, a start first. Leaves out lines that a kill cut off, with a note. Raises ValueError."""
    torn, has_start = 0, False
    with regular_file(path).open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                record = json.loads(line)
            except ValueError:
                torn += 1
                continue
            is_record = isinstance(record, dict) and record.get("schema", SCHEMA) == SCHEMA
            has_start |= is_record and "schema" in record
            kinds = _START if is_record and "schema" in record else _POINT
            if not (is_record and has_start and all(isinstance(record.get(key), kinds[key]) for key in kinds)):
                raise ValueError(f"{path} is not of schema {SCHEMA} (docs/reference/log.md): {line.strip()[:60]}")
            yield record
    if torn:
        print(f"note: {path}: {torn} lines were cut off, by a kill for example, and are left out", file=sys.stderr)
