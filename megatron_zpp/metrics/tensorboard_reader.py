"""Read back what runs wrote with --tensorboard-dir; the charts of TensorBoard, wandb reports and tools/report.py."""

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

Points = dict[int, float]  # value by iteration, in order
Curve = list[tuple[float, float]]
DASHBOARD = {  # group: chart: key
    "Loss": {
        "training loss": "lm loss",
        "validation loss": "lm loss validation",
    },
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
    """One run's settings and metrics."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Points] = field(default_factory=dict)  # by key, see docs/reference/log.md
    samples: Points = field(default_factory=dict)  # consumed by each iteration that has a loss
    seconds: Points = field(default_factory=dict)  # since the first loss, without the time between a stop and a resume

    def curve(self, key: str, axis: str) -> Curve:
        """Return (place on one of ``AXES``, value) of each point of a key that has a place there."""
        points, length = self.metrics.get(key, {}), int(self.settings.get("seq_length", 0))
        places = {
            "iteration": {i: float(i) for i in points},
            "tokens": {i: samples * length for i, samples in self.samples.items() if length},
            "time": self.seconds,
            "bytes sent between nodes": self.bytes_so_far("comm/bytes-between-nodes"),
        }[axis]
        return [(places[i], value) for i, value in points.items() if i in places]

    def bytes_so_far(self, key: str) -> Points:
        """Sum up a key of bytes per step, whose points are means over the steps since the point before."""
        total, last, sent = 0.0, 0, {}
        for iteration, nbytes in self.metrics.get(key, {}).items():
            total += nbytes * (iteration - last)
            sent[iteration], last = total, iteration
        return sent


def find_runs(folders: list[Path]) -> dict[str, list[Path]]:
    """Return the event files, oldest first, of each folder that holds some. Raises ValueError if there are none."""
    runs: dict[str, list[Path]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        files = sorted(folder.rglob("*tfevents*"), key=lambda path: (path.parent, path.name))
        if not files:
            none = f"{folder} holds no TensorBoard events: give what a run was given as --tensorboard-dir"
            logs = ", ".join(path.name for path in sorted(folder.glob("*.log")))
            raise ValueError(none + (f". Logs, as {logs}, are for examples/quickstart/summary.py compare" * bool(logs)))
        for parent, group in itertools.groupby(files, key=lambda path: path.parent):
            runs[str(parent)] = list(group)
    return runs


def read_run(name: str, files: list[Path]) -> RunHistory:
    """Join the event files of one run, oldest first; a file written after a resume replaces the later iterations."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ImportError("reading runs needs the package tensorboard, of megatron_zpp's extra tensorboard") from None

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
        if "lm loss" in scalars:  # an evaluation alone leaves the training's points as they are
            losses = scalars["lm loss"]
            samples = events.Scalars("lm loss vs samples") if "lm loss vs samples" in tags["scalars"] else []
            pairs = zip(losses, samples, strict=False)  # the last loss of a killed run may be alone
            _replace_from(first, run.samples, {loss.step: over_samples.step for loss, over_samples in pairs})
            before = max((seconds for i, seconds in run.seconds.items() if i < first), default=0.0)
            begun = losses[0].wall_time - before
            _replace_from(first, run.seconds, {point.step: point.wall_time - begun for point in losses})
            scalars = {key: scalars.get(key, []) for key in run.metrics | scalars}
        for key, points in scalars.items():
            _replace_from(first, run.metrics.setdefault(key, {}), {point.step: point.value for point in points})
    if "lm loss" not in run.metrics:
        raise ValueError(f"{name} holds no training losses: did its run make a step?")
    return run


def _replace_from(first: int, points: Points, new: Points) -> None:
    for iteration in [iteration for iteration in points if iteration >= first]:
        del points[iteration]
    points.update(new)


def tensorboard_layout() -> dict[str, dict[str, list[object]]]:
    """Return ``DASHBOARD`` for SummaryWriter.add_custom_scalars."""
    return {  # TensorBoard matches tags from their start, hence ``$``
        group: {chart: ["Multiline", [f"{re.escape(key)}$"]] for chart, key in charts.items()}
        for group, charts in DASHBOARD.items()
    }
