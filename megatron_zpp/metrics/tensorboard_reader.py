"""Reads back what runs wrote with --tensorboard-dir."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

Points = dict[int, float]  # value by iteration, in order


@dataclass
class RunHistory:
    """One run's settings and metrics."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Points] = field(default_factory=dict)  # by key, see docs/logging.md
    samples: Points = field(default_factory=dict)  # consumed by each iteration that has a loss
    seconds: Points = field(default_factory=dict)  # since the first loss, without the time between a stop and a resume

    def over_tokens(self, key: str) -> list[tuple[float, float]]:
        """(tokens so far, value) of a key."""
        length = int(self.settings.get("seq_length", 0))
        points = self.metrics.get(key, {}) if length else {}
        return [(self.samples[i] * length, value) for i, value in points.items() if i in self.samples]

    def over_seconds(self, key: str) -> list[tuple[float, float]]:
        """(seconds so far, value) of a key."""
        return [(self.seconds[i], value) for i, value in self.metrics.get(key, {}).items() if i in self.seconds]

    def over_bytes_between_nodes(self, key: str) -> list[tuple[float, float]]:
        """(bytes sent between nodes so far, value) of a key, where bytes were written."""
        sent = self.bytes_so_far("comm/bytes-between-nodes")
        return [(sent[i], value) for i, value in self.metrics.get(key, {}).items() if i in sent]

    def bytes_so_far(self, key: str) -> Points:
        """The sum of a key of bytes per step: those at an iteration are of every step since the iteration before."""
        total, last, sent = 0.0, 0, {}
        for iteration, nbytes in self.metrics.get(key, {}).items():
            total += nbytes * (iteration - last)
            sent[iteration], last = total, iteration
        return sent


def find_runs(folders: list[Path]) -> dict[str, list[Path]]:
    """The event files of each run, oldest first: of every folder that holds some, as TensorBoard takes them.

    Raises ValueError for a folder that is not there, or has none in it.
    """
    runs: dict[str, list[Path]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        files = sorted(folder.rglob("*tfevents*"), key=lambda path: (path.parent, path.name))
        if not files:
            raise ValueError(f"{folder} holds no TensorBoard events: give what a run was given as --tensorboard-dir")
        for parent, group in itertools.groupby(files, key=lambda path: path.parent):
            runs[str(parent)] = list(group)
    return runs


def read_run(name: str, files: list[Path]) -> RunHistory:
    """Put together what the event files of one run hold, oldest first; one written after a resume replaces the rest.

    Raises ValueError where nothing was trained, ImportError without the package tensorboard.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ImportError(
            "reading runs needs the package tensorboard: pip install tensorboard, or megatron_zpp's extra tensorboard"
        ) from None

    run = RunHistory(name)
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = events.Tags()
        for tag in tags["tensors"]:
            setting, is_text, _ = tag.partition("/text_summary")
            if is_text:
                run.settings[setting] = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        scalars = {tag: events.Scalars(tag) for tag in tags["scalars"] if not tag.endswith(" vs samples")}
        first = min((points[0].step for points in scalars.values()), default=None)
        if first is None:
            continue
        if "lm loss" in scalars:  # one that only evaluated leaves what was trained as it is
            # Written pairwise; the last of a killed run may be alone.
            samples = events.Scalars("lm loss vs samples") if "lm loss vs samples" in tags["scalars"] else []
            pairs = zip(scalars["lm loss"], samples, strict=False)
            _replace_from(first, run.samples, {loss.step: over_samples.step for loss, over_samples in pairs})
            before = max((seconds for i, seconds in run.seconds.items() if i < first), default=0.0)
            begun = scalars["lm loss"][0].wall_time - before
            seconds = {point.step: point.wall_time - begun for point in scalars["lm loss"]}
            _replace_from(first, run.seconds, seconds)
            scalars = {key: scalars.get(key, []) for key in run.metrics | scalars}
        for key, points in scalars.items():
            _replace_from(first, run.metrics.setdefault(key, {}), {point.step: point.value for point in points})
    if "lm loss" not in run.metrics:
        raise ValueError(f"{name} holds no training losses: did its run get to --tensorboard-log-interval iterations?")
    return run


def _replace_from(first: int, points: Points, new: Points) -> None:
    for iteration in [iteration for iteration in points if iteration >= first]:
        del points[iteration]
    points.update(new)
