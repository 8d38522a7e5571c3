"""Compare runs on one HTML page with plots and a table, which needs no server and no network."""

import argparse
import html
import importlib
import io
import itertools
import math
import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.data.text.packages import load_package
from megatron_zpp.errors import attempt, reports_errors
from megatron_zpp.metrics.history import AXES, DASHBOARD, Curve, RunHistory, find_runs, read_training
from megatron_zpp.metrics.lines import format_duration
from megatron_zpp.settings.flags import local_path

SMOOTHED_OVER = 40  # points of a training loss
MOST_POINTS = 300  # per chart, over all its curves
BETWEEN, WITHIN = "comm/bytes-between-nodes", "comm/bytes-within-nodes"
# Settings that say where a run wrote, not what it did.
PLACES = {"command", "save", "load", "data_cache_path", "metrics_dir", "tensorboard_dir", "wandb_exp_name"}
ORIGIN = "command", "hardware", "world_size", "commit", "torch_version"
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark; }} body {{ font: 15px sans-serif; margin: 1em; }}
.table {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #8888; padding: .3em .9em; text-align: right; }} th {{ text-align: left; }}
td {{ font-variant-numeric: tabular-nums; max-width: 20em; overflow-wrap: break-word; }}
.words td {{ text-align: left; vertical-align: top; }}
svg {{ max-width: 100%; height: auto; font-family: sans-serif; }}
@media (prefers-color-scheme: dark) {{ svg {{ filter: invert(1) hue-rotate(180deg); }} }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def summary(run: RunHistory) -> dict[str, str]:

    def values(key: str) -> list[float]:
        return [*run.metrics.get(key, {}).values()]

    def shown(value: float, template: str) -> str:
        return "" if math.isnan(value) else template.format(value)

    def mean(points: list[float], template: str) -> str:
        return template.format(statistics.fmean(points)) if points else ""

    losses = values("lm loss")
    rows = {
        "iterations": f"{max(run.metrics['lm loss']):,}",
        "tokens": f"{max((tokens for tokens, _ in run.curve('lm loss', 'tokens')), default=0):,.0f}",
        "training loss (mean of the last tenth of its points)": mean(losses[-max(1, len(losses) // 10) :], "{:.4f}"),
        "validation loss (last)": shown(run.last("lm loss validation"), "{:.4f}"),
        "tokens per second (median)": shown(run.tokens_per_second, "{:,.0f}"),
        "MB between nodes per step (mean)": shown(run.mean(BETWEEN) / 1e6, "{:.3f}"),
        "MB within nodes per step (mean)": shown(run.mean(WITHIN) / 1e6, "{:.3f}"),
    }
    for chart, key in DASHBOARD["Quantization error"].items():
        if key.startswith("comm/nonfinite"):
            rows[f"{chart} (sum)"] = f"{sum(values(key)):,.0f}" if values(key) else ""
        else:
            rows[f"{chart} (mean)"] = mean(values(key), "{:.4g}")
    return rows


def differing_settings(runs: list[RunHistory]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with each run's value."""
    names = sorted(set().union(*(run.settings for run in runs)) - PLACES)
    values = {name: [str(run.settings.get(name, "")) for run in runs] for name in names}
    return {name: per_run for name, per_run in values.items() if len(set(per_run)) > 1}


def over_first(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Divide each run's figures by the first run's, but for those that are equal."""
    changed = {name: cells for name, cells in rows.items() if all(cells) and len({*cells}) > 1}
    numbers = {name: [float(cell.replace(",", "")) for cell in cells] for name, cells in changed.items()}
    return {name: [f"{value / every[0]:.4g} x" for value in every] for name, every in numbers.items() if every[0]}


def charts(runs: list[RunHistory]) -> dict[str, dict[tuple[str, str], dict[str, Curve]]]:
    """Return curves by group, by chart and axis, and by run. Leave out charts of single points."""
    groups: dict[str, dict[tuple[str, str], dict[str, Curve]]] = {}
    for group, entries in DASHBOARD.items():
        for (chart, key), axis in itertools.product(entries.items(), AXES if group == "Loss" else AXES[:1]):
            curves = {run.name: curve for run in runs if (curve := run.curve(key, axis))}
            if any(len(curve) > 1 for curve in curves.values()):
                groups.setdefault(group, {})[chart, axis] = curves
    return groups


def write_html(runs: list[RunHistory], path: Path, cluster: str | None = None) -> None:
    """Write the page. Raises ImportError without matplotlib, ValueError if ``cluster`` is not the runs'."""
    load_package("matplotlib", "the page", "plot").use("Agg")
    summaries = [summary(run) for run in runs]
    rows = {name: [per_run[name] for per_run in summaries] for name in summaries[0]}
    parts = [_table({name: cells for name, cells in rows.items() if any(cells)}, runs)]
    if len(runs) > 1:
        parts += [f"<h2>Over {html.escape(runs[0].name)}</h2>", _table(over_first(rows), runs)]
    origin = {name: [str(run.settings.get(name, "")) for run in runs] for name in ORIGIN}
    parts += ["<h2>Command and hardware</h2>", _table(origin, runs, "table words")]
    if cluster is not None:
        from megatron_zpp.planning.cluster import parse_cluster  # both need torch, which pages do not
        from megatron_zpp.planning.predict import compare_with_log

        compared = [compare_with_log(run, parse_cluster(cluster)) for run in runs]
        seconds = {f"ms for {part}": [each[part] for each in compared] for part in compared[0]}
        cells = {name: [f"{1000 * a:,.1f}, {1000 * b:,.1f}" for a, b in pairs] for name, pairs in seconds.items()}
        parts += ["<h2>Predicted, measured</h2>", _table(cells, runs)]
    parts += ["<h2>Settings that differ</h2>", _table(differing_settings(runs), runs, "table words")]
    colors = {run.name: f"C{i}" for i, run in enumerate(runs)}
    for group, entries in charts(runs).items():
        parts.append(f"<h2>{group}</h2>")
        parts += [_plot(chart, axis, curves, colors) for (chart, axis), curves in entries.items()]
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    with attempt("write the report to", path):
        path.write_text(PAGE.format(title=title, body="\n".join(parts)), encoding="utf-8")


def _table(rows: Mapping[str, list[str]], runs: list[RunHistory], classes: str = "table") -> str:
    def row(name: str, cells: list[str]) -> str:
        return f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"

    header = row("", [run.name for run in runs])
    body = "".join(row(name, cells) for name, cells in rows.items())
    return f'<div class="{classes}"><table>{header}{body}</table></div>'


def _plot(chart: str, axis: str, curves: dict[str, Curve], colors: dict[str, str]) -> str:
    from matplotlib import pyplot, rc_context
    from matplotlib.ticker import EngFormatter, FuncFormatter

    # Text is smaller than its outlines; a folder's name is no formula.
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        points, lines = max(10, MOST_POINTS // len(curves)), []
        for name, curve in curves.items():
            x, y = zip(*thinned(curve, points), strict=True)
            if chart == "training loss" and len(curve) > SMOOTHED_OVER:
                axes.plot(x, y, color=colors[name], linewidth=0.6, alpha=0.3)
                x, y = zip(*thinned(smoothed(curve), points), strict=True)
            lines += axes.plot(x, y, color=colors[name], linewidth=1.2, marker="." if len(x) < 30 else None)
        axes.set(xlabel=axis, title=chart)
        if axis == "time":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_duration(max(0.0, seconds))))
        else:
            axes.xaxis.set_major_formatter(EngFormatter(unit="B" if "bytes" in axis else "", sep=" "))
        if "loss" not in chart:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(EngFormatter(unit="B" if "bytes" in chart else "", sep=" "))
        axes.grid(alpha=0.3)
        axes.legend(lines, list(curves), fontsize="small")  # labels of lines would lose names that begin with _
        image = io.StringIO()
        figure.savefig(image, format="svg")
        pyplot.close(figure)
    label = f'role="img" aria-label="{html.escape(chart)} over {axis}"'
    drawing = image.getvalue()
    # Keep tenths of a point, in tags only: between them are axis labels.
    drawing = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(?<=\d\.\d)\d+", "", tag[0]), drawing[drawing.index("<svg") :])
    return drawing.replace("<svg", f"<svg {label}", 1)


def smoothed(curve: Curve) -> Curve:
    """Average over a window of a twentieth of the points around each."""
    half = max(1, len(curve) // 40)
    values = [value for _, value in curve]
    return [(x, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(curve)]


def thinned(curve: Curve, points: int) -> Curve:
    """Keep at most ``points`` points, including the last one."""
    every = -(-len(curve) // points)
    return curve[(len(curve) - 1) % every :: every]


def wandb_pages(project: str, entity: str | None, group: str | None) -> tuple[Any, Any]:
    """Build a workspace view and a report of wandb with the same charts, of a group's runs or of all. Saves neither."""
    reports, workspaces = map(importlib.import_module, ("wandb_workspaces.reports.v2", "wandb_workspaces.workspaces"))
    place = {"project": project, "entity": entity or importlib.import_module("wandb").Api().default_entity}
    runs = {"filters": f"Metric('Group') == {group!r}"} if group is not None else {}
    blocks, sections = [], []
    for name, entries in DASHBOARD.items():
        panels = [reports.LinePlot(title=chart, y=[key]) for chart, key in entries.items()]
        if name == "Loss":
            panels.append(reports.LinePlot(title="training loss over tokens", x="tokens", y=["lm loss"]))
        blocks += [reports.H2(name), reports.PanelGrid(runsets=[reports.Runset(**place, **runs)], panels=panels)]
        sections.append(workspaces.Section(name=name, panels=panels, is_open=True))
    settings, title = workspaces.RunsetSettings(**runs), group or "megatron_zpp"
    view = workspaces.Workspace(**place, name=title, sections=sections, runset_settings=settings)
    return view, reports.Report(**place, title=title, blocks=blocks)


def save_wandb_pages(project: str, entity: str | None, group: str | None) -> list[str]:
    """Save both pages. Return their addresses. Raises ImportError or ValueError."""
    try:
        return [str(page.save().url) for page in wandb_pages(project, entity, group)]
    except ImportError:
        raise ImportError("--wandb needs two packages: pip install wandb wandb-workspaces") from None
    except Exception as error:  # wandb raises bare ones
        raise ValueError(f"--wandb {project}: {error}") from None


@reports_errors
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare training runs on one page.", allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="*", type=local_path(Path), metavar="RUN_DIR", help="folder that holds metrics.jsonl")
    add("--output", type=local_path(Path), default=Path("report.html"), help="page to write; default report.html")
    cluster = "file of tools/plan.py --measure, or such as 2x8xH100@400: also show the planner's prediction"
    add("--cluster", type=local_path(str), metavar="FILE", help=cluster)
    add("--wandb", metavar="PROJECT", help="save the plots as a view and a report of this wandb project instead")
    add("--wandb-entity", metavar="NAME", help="the project's owner; default: your account")
    add("--wandb-group", metavar="NAME", help="group of the experiment's runs; default: all of the project")
    args = parser.parse_args(argv)
    if bool(args.runs) == (args.wandb is not None):
        parser.error("give either folders of runs, or --wandb PROJECT")
    if args.cluster and args.wandb:
        parser.error("--cluster adds to the page of folders of runs; leave it or --wandb out")
    if args.wandb is not None:
        print("view: {}\nreport: {}".format(*save_wandb_pages(args.wandb, args.wandb_entity, args.wandb_group)))
        return
    if args.wandb_entity or args.wandb_group:
        parser.error("--wandb-entity and --wandb-group need --wandb PROJECT")
    found = find_runs(args.runs)
    common = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in found])
    runs = [read_training(os.path.relpath(folder, common), path) for folder, path in found.items()]
    write_html(runs, args.output, args.cluster)
    print(f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {args.output}")
