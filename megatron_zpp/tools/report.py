"""Compares runs at a glance: one HTML page with plots and a table, which needs no server and no network.

    python tools/report.py runs/zero3 runs/zeropp --output report.html
    python tools/report.py --wandb PROJECT

A run is a folder that holds TensorBoard events (--tensorboard-dir); a folder of such folders is all of them. With
--wandb the same plots are saved as a report of a wandb project, over the runs that are there.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.metrics.dashboard import DASHBOARD
from megatron_zpp.metrics.tensorboard_reader import RunHistory, find_runs, read_run
from megatron_zpp.tools.run import report_errors

Curve = list[tuple[float, float]]
BETWEEN, WITHIN = "comm/bytes-between-nodes", "comm/bytes-within-nodes"
# Which folder a run wrote to says nothing about it.
PLACES = {"tensorboard_dir", "save", "load", "wandb_exp_name", "wandb_save_dir", "data_cache_path"}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px sans-serif; margin: 2em; }} table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3em .9em; text-align: right; }} th {{ text-align: left; }}
td {{ font-variant-numeric: tabular-nums; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def summary(run: RunHistory) -> dict[str, str]:
    """A run's last figures."""
    metrics = run.metrics
    losses = list(metrics["lm loss"].values())
    rows = {
        "iterations": f"{max(metrics['lm loss']):,}",
        "tokens": f"{max((tokens for tokens, _ in run.over_tokens('lm loss')), default=0):,.0f}",
        "training loss (mean of the last tenth of its points)": _mean(losses[-max(1, len(losses) // 10) :], "{:.4f}"),
        "validation loss (last)": _mean(list(metrics.get("lm loss validation", {}).values())[-1:], "{:.4f}"),
        # The first point's step warms everything up.
        "tokens per second (median)": _median(list(metrics.get("tokens-per-second", {}).values()), "{:,.0f}"),
        "MB between nodes per step (mean)": _megabytes_per_step(run, BETWEEN),
        "MB within nodes per step (mean)": _megabytes_per_step(run, WITHIN),
    }
    for chart, key in DASHBOARD["Quantization error"].items():
        values = metrics.get(key, {}).values()
        if key.startswith("comm/nonfinite"):
            rows[f"{chart} (sum)"] = f"{sum(values):,.0f}" if values else ""
        else:
            rows[f"{chart} (mean)"] = _mean(values, "{:.4g}")
    return rows


def _mean(values: Iterable[float], template: str) -> str:
    values = list(values)
    return template.format(statistics.fmean(values)) if values else ""


def _megabytes_per_step(run: RunHistory, key: str) -> str:
    sent = run.bytes_so_far(key)
    return f"{sent[max(sent)] / max(sent) / 1e6:.3f}" if sent else ""


def _median(values: list[float], template: str) -> str:
    return template.format(statistics.median(values[1:] or values)) if values else ""


def differing_settings(runs: list[RunHistory]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs, each run's value."""
    names = sorted(set().union(*(run.settings for run in runs)) - PLACES)
    values = {name: [run.settings.get(name, "") for run in runs] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def charts(runs: list[RunHistory]) -> dict[str, dict[tuple[str, str], dict[str, Curve]]]:
    """Group: (what is drawn, over what): run: curve. Those of which no run has any point are left out."""
    groups: dict[str, dict[tuple[str, str], dict[str, Curve]]] = {}
    for group, of_group in DASHBOARD.items():
        axes: dict[str, Callable[[RunHistory, str], Curve]] = {"iteration": _over_iterations}
        if group == "Loss":
            axes |= {
                "tokens": RunHistory.over_tokens,
                "bytes sent between nodes": RunHistory.over_bytes_between_nodes,
            }
        for chart, key in of_group.items():
            for axis, curve_of in axes.items():
                curves = {run.name: curve for run in runs if (curve := curve_of(run, key))}
                if curves:
                    groups.setdefault(group, {})[chart, axis] = curves
    return groups


def _over_iterations(run: RunHistory, key: str) -> Curve:
    return [(float(iteration), value) for iteration, value in run.metrics.get(key, {}).items()]


def write_html(runs: list[RunHistory], path: Path) -> None:
    """The page. Raises ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "the page's plots need the package matplotlib: pip install matplotlib, or megatron_zpp's extra plot"
        ) from None
    matplotlib.use("Agg")
    summaries = [summary(run) for run in runs]
    rows = {name: [of_run[name] for of_run in summaries] for name in summaries[0]}
    parts = [
        _table({name: cells for name, cells in rows.items() if any(cells)}, runs),
        "<h2>Settings that differ</h2>",
        _table(differing_settings(runs), runs),
    ]
    colors = {run.name: f"C{i}" for i, run in enumerate(runs)}
    for group, of_group in charts(runs).items():
        parts.append(f"<h2>{group}</h2>")
        parts += [_plot(chart, axis, curves, colors) for (chart, axis), curves in of_group.items()]
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    path.write_text(PAGE.format(title=title, body="\n".join(parts)), encoding="utf-8")


def _table(rows: Mapping[str, list[str]], runs: list[RunHistory]) -> str:
    def row(name: str, cells: list[str]) -> str:
        return f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"

    header = row("", [run.name for run in runs])
    return f"<table>{header}{''.join(row(name, cells) for name, cells in rows.items())}</table>"


def _plot(chart: str, axis: str, curves: dict[str, Curve], colors: dict[str, str]) -> str:
    """One chart as an image in the page."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, curve in curves.items():
        x, y = zip(*curve, strict=True)
        axes.plot(x, y, color=colors[name], label=name, linewidth=1, marker="." if len(x) < 30 else None)
    axes.set(xlabel=axis, title=chart)
    if "loss" not in chart:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    pyplot.close(figure)
    encoded = base64.b64encode(image.getvalue()).decode()
    return f'<img alt="{html.escape(chart)} over {axis}" src="data:image/svg+xml;base64,{encoded}">'


def wandb_report(project: str, entity: str | None) -> Any:
    """The same charts as an unsaved report of a wandb project. Raises ImportError without wandb_workspaces."""
    try:
        import wandb_workspaces.reports.v2 as reports
    except ImportError:
        raise ImportError("--wandb needs two packages: pip install wandb wandb-workspaces") from None
    place = {"project": project} | ({"entity": entity} if entity is not None else {})
    blocks = []
    for group, of_group in DASHBOARD.items():
        panels = [reports.LinePlot(title=chart, y=[key]) for chart, key in of_group.items()]
        if group == "Loss":
            panels.append(reports.LinePlot(title="training loss over samples", x="samples vs steps", y=["lm loss"]))
        blocks += [reports.H2(group), reports.PanelGrid(runsets=[reports.Runset(**place)], panels=panels)]
    return reports.Report(**place, title="megatron_zpp", blocks=blocks)


def save_wandb_report(project: str, entity: str | None) -> str:
    """Returns its address. Raises ValueError with what wandb says, such as that nobody is logged in."""
    report = wandb_report(project, entity)
    try:
        report.save()
    except Exception as error:  # wandb raises bare ones
        raise ValueError(f"wandb: {error}") from None
    return report.url


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare training runs on one page.", allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN_DIR", help="what was given to --tensorboard-dir")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="page to write; default report.html")
    parser.add_argument("--wandb", metavar="PROJECT", help="save the plots as a report of this wandb project instead")
    parser.add_argument("--wandb-entity", metavar="NAME", help="the project's owner; default your own")
    args = parser.parse_args(argv)
    if bool(args.runs) == (args.wandb is not None):
        parser.error("give either folders of runs, or --wandb PROJECT")
    return report_errors(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    if args.wandb is not None:
        print(f"report: {save_wandb_report(args.wandb, args.wandb_entity)}")
        return
    found = find_runs(args.runs)
    common = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in found])
    runs = [read_run(os.path.relpath(folder, common), files) for folder, files in found.items()]
    write_html(runs, args.output)
    print(f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {args.output}")


if __name__ == "__main__":
    sys.exit(main())
