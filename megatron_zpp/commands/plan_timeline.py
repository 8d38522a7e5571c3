"""Draw the simulated step of two plans, one above the other: what computes, which links are busy, what waits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.data.text.packages import load_package
from megatron_zpp.planning.predict import Prediction, step_shapes
from megatron_zpp.planning.step import BETWEEN, COMPUTE, WITHIN, Span, simulate, timeline

LANES = {COMPUTE: "tab:blue", WITHIN: "tab:green", BETWEEN: "tab:orange"}  # from top to bottom
EXPOSED = "tab:red"


def draw_timelines(predictions: Mapping[str, Prediction], path: Path) -> None:
    """Draw up to four micro-batches of each prediction's slowest rank, on one axis of time. Raises ImportError."""
    load_package("matplotlib", "--timeline", "plot").use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(predictions), figsize=(10, 1 + 1.9 * len(predictions)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (name, prediction) in zip(panels[:, 0], predictions.items(), strict=True):
        needs = prediction.needs
        shapes = step_shapes(needs, prediction.cluster)
        spans = timeline(max(shapes, key=lambda shape: simulate(shape).seconds))
        for row, (lane, color) in enumerate(LANES.items()):
            _bars(axes, row, [(span.start, span.end) for span in spans if span.stream == lane], color)
        _bars(axes, 0, waits(spans), EXPOSED)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        of_all = f" (the first of {needs.micro_batches} micro-batches)" if needs.micro_batches > 4 else ""
        axes.set_title(f"{name}: {prediction.time.seconds:.3g} s a step{of_all}", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("seconds, predicted; red: the device waits")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def waits(spans: list[Span]) -> list[tuple[float, float]]:
    """Return when nothing computes, from the first to the last work of the step."""
    computing = sorted((span.start, span.end) for span in spans if span.stream == COMPUTE and span.end > span.start)
    ends = [0.0, *(end for _, end in computing)]
    starts = [*(start for start, _ in computing), max((span.end for span in spans), default=0.0)]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _bars(axes: Any, row: int, intervals: list[tuple[float, float]], color: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in intervals], (row - 0.4, 0.8), facecolors=color)
