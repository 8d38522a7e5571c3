"""Tables of the study's results, and the pages under docs/evidence/experiments/ that they make."""

import io
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, markdown_table
from study_arms import CPU, SCALES, Arm, Experiment
from study_experiments import EXPERIMENTS, HEADLINES

from megatron_zpp.zeropp.recipes import RECIPES

PAGE = ROOT / "docs" / "evidence" / "experiments.md"
ABOUT = tomllib.loads((Path(__file__).parent / "study_pages.toml").read_text())
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)  # Student's t, 97.5 %, of 2 to 8 seeds
NO_LOSS = 0.3  # percent: an interval within plus or minus this shows that nothing is lost
Rows = dict[str, dict[int, dict[str, Any]]]  # by flags, then by seed


def by_flags_and_seed(rows: Sequence[dict[str, Any]]) -> Rows:
    """Sort rows by arm and seed. Raises ValueError for a second row, which would replace the first in every table."""
    by_flags: Rows = defaultdict(dict)
    for row in rows:
        if row["seed"] in by_flags[row["flags"]]:
            raise ValueError(f"two rows of seed {row['seed']} of {row['flags']!r}: remove the later one")
        by_flags[row["flags"]][row["seed"]] = row
    return dict(by_flags)


def page_of(name: str, rows: Rows) -> str:
    """Return the whole page of one experiment."""
    experiment = EXPERIMENTS[name]
    scale = SCALES[experiment.scale]
    setup = ABOUT["model"] if scale.shape == CPU.shape else ""
    arms = [arm for group in experiment.groups for arm in group.arms]
    setup += "" if all("--lr " in arm.flags for arm in arms) else ABOUT["rate"].format(rate=scale.lr)
    how = ABOUT["how"].strip().format(name=name, control=experiment.control)
    trained = {arm.flags for arm in arms} & rows.keys()
    took = [row["seconds"] for flags in trained for row in rows[flags].values()]
    how += f" Number of runs: {len(took)}, of {sum(took) / 3600:.1f} hours together, some beside other programs."
    text = f"# {name}: {experiment.title}\n\n{ABOUT[name]}\n{setup}{how} {resolution(experiment, rows)}\n\n"
    feedback = table_of_feedback(experiment, rows)
    return text + table(experiment, rows) + (f"\n{ABOUT['feedback']}\n{feedback}\n" if feedback else "")


def table(experiment: Experiment, rows: Rows) -> str:
    """One Markdown table: the groups one below the other, of each arm that was trained with a seed of its control."""
    columns = ["on the wire", "validation loss", f"over {experiment.control}", "seeds", "", "bytes"]
    columns += experiment.observed
    lines = []
    for group in experiment.groups:
        trained = [arm for arm in group.arms if excesses(arm, rows)]
        if trained:
            lines.append([f"**{group.title}**", *[""] * (len(columns) - 1)])
        lines += [_line(arm, rows, experiment.observed) for arm in trained]
    return markdown_table(columns, lines) + "\n"


def _line(arm: Arm, rows: Rows, observed: Sequence[str]) -> list[str]:
    found = excesses(arm, rows)
    trained = [rows[arm.flags][seed] for seed in found]
    loss = statistics.mean(row["validation_loss"] for row in trained)
    sent = trained[0]["bytes_per_parameter"]
    over, shown = "", ""
    if arm.flags != arm.control:
        over, shown = difference(list(found.values())), verdict(list(found.values()))
    sent_shown = f"{sent:.{2 if sent >= 0.2 else 3}f}" if sent else ""  # PowerSGD's are not counted
    cells = [arm.name, f"{loss:.4f}", over, str(len(found)), shown, sent_shown]
    for name in observed:
        seen = [row["observed"][name] for row in trained if name in row.get("observed", {})]  # the first rows have none
        cells.append(f"{statistics.mean(seen):.2f}" if seen else "")
    return cells


def excesses(arm: Arm, rows: Rows) -> dict[int, float]:
    """Percent of loss over the control's by seed: both saw the same data in the same order."""
    ours, control = rows.get(arm.flags, {}), rows.get(arm.control, {})
    return {
        seed: 100 * (ours[seed]["validation_loss"] / control[seed]["validation_loss"] - 1)
        for seed in sorted(ours.keys() & control.keys())
    }


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % t-interval of the mean; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def difference(values: Sequence[float]) -> str:
    """Format the mean with its 95 % interval."""
    interval = f" ± {half_width(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.2f}{interval} %"


def verdict(values: Sequence[float]) -> str:
    """Say in words what the interval shows."""
    mean, half = statistics.mean(values), half_width(values)
    if math.isinf(half):
        return "one seed"
    if max(abs(mean - half), abs(mean + half)) <= NO_LOSS:
        return "no loss seen"
    return "higher" if mean - half > 0 else "lower" if mean + half < 0 else "not resolved"


def resolution(experiment: Experiment, rows: Rows) -> str:
    """Say how wide the intervals of an experiment are, by the number of seeds."""
    widths = defaultdict(list)
    for found in (excesses(arm, rows) for group in experiment.groups for arm in group.arms if arm.flags != arm.control):
        if len(found) > 1:
            widths[len(found)].append(half_width([*found.values()]))
    spans = {seeds: [*dict.fromkeys((f"{min(w):.2f}", f"{max(w):.2f}"))] for seeds, w in sorted(widths.items())}
    said = [f"± {' to '.join(span)} % with {seeds} seeds" for seeds, span in spans.items()]
    return f"Intervals are {', '.join(said)}." if said else "One seed has no interval."


def table_of_feedback(experiment: Experiment, rows: Rows) -> str:
    """Compare LoCo with classic error feedback, paired by seed; return "" if the experiment has no such arms."""
    lines = []
    for group in experiment.groups:
        flags = {arm.name: arm.flags for arm in group.arms}
        if "error feedback" in flags:
            found = [*excesses(Arm("", flags["LoCo"], flags["error feedback"]), rows).values()]
            if found:
                lines.append([group.title, difference(found), len(found), verdict(found)])
    return markdown_table(["gradients", "LoCo over error feedback", "seeds", ""], lines) if lines else ""


def plot_of_sizes(rows_of: Callable[[str], Rows]) -> str:
    """Draw differences from the bf16 wire over model sizes as SVG: seeds, means, and intervals from three seeds on."""
    from matplotlib import figure, style  # an extra, which the tables do without

    larger = (EXPERIMENTS["E22"], EXPERIMENTS["E17"])
    by_size = [*(("tuned", group) for group in HEADLINES), *((e.scale, e.groups[0]) for e in larger)]
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": ""}]):
        drawing = figure.Figure(figsize=(7, 3), layout="constrained")
        axes = drawing.subplots()
        axes.axhline(0, color="0.8")
        for i, recipe in enumerate(("`int8`", "`int6`", "`ternary`")):
            found: dict[float, list[float]] = {}
            for scale, group in by_size:
                rows = rows_of(scale)
                for arm in group.arms:
                    if arm.name == recipe and (differences := excesses(arm, rows)):
                        parameters = next(iter(rows[arm.flags].values()))["num_parameters"]
                        found[parameters * 1.04**i] = list(differences.values())  # beside each other
            for size, values in found.items():
                axes.plot([size] * len(values), values, f"C{i}.", markersize=3, alpha=0.5)
            halves = [half_width(values) if len(values) > 2 else math.nan for values in found.values()]
            means = [*map(statistics.mean, found.values())]
            axes.errorbar([*found], means, halves, fmt=f"C{i}o", capsize=3, label=recipe.strip("`"))
        axes.set(xscale="log", xlabel="parameters", ylabel="loss over bf16 (%)")
        axes.legend()
        drawn = io.StringIO()
        drawing.savefig(drawn, format="svg", metadata={"Creator": None, "Date": None})
    return drawn.getvalue()


def losses_of_recipe(name: str, rows: Rows) -> list[str]:
    """Losses over the bf16 wire on the GPT and the Llama of E19; "" below three seeds."""
    arms = [arm for group in HEADLINES for arm in group.arms if arm.name.strip("`") == name]
    found = [list(excesses(arm, rows).values()) for arm in arms]
    return [difference(values) if len(values) >= 3 else "" for values in found] or ["", ""]


def table_of_recipes(rows: Rows) -> str:
    """The recipes, with what their arms of E19 lose, and bytes of the GPT."""
    arms = {arm.name.strip("`"): arm.flags for arm in HEADLINES[0].arms}
    sent = {name: f"{rows[flags][1]['bytes_per_parameter']:.2f}" for name, flags in arms.items() if name in RECIPES}
    lines = [
        [f"`{name}`", recipe.summary, sent.get(name, ""), *losses_of_recipe(name, rows), recipe.evidence]
        for name, recipe in RECIPES.items()
    ]
    return markdown_table(["recipe", "what it sends", "bytes", "loss, GPT", "loss, Llama", "evidence"], lines)


def table_of_rates(rows: Rows) -> str:
    """E18: mean validation losses by wire and learning rate, with the number of seeds.

    Bold: the lowest, if both neighbors were trained too.
    """
    groups = EXPERIMENTS["E18"].groups
    rates = sorted({_rate_of(arm) for group in groups for arm in group.arms}, key=float)
    lines = []
    for group in groups:
        trained = {_rate_of(arm): rows.get(arm.flags, {}).values() for arm in group.arms}
        means = {r: statistics.mean(row["validation_loss"] for row in seeds) for r, seeds in trained.items() if seeds}
        losses = {rate: f"{mean:.4f} ({len(trained[rate])})" for rate, mean in means.items()}
        best, own = min(means, key=lambda rate: means[rate], default=""), [*trained]
        if best in own[1:-1] and {own[own.index(best) - 1], own[own.index(best) + 1]} <= means.keys():
            losses[best] = f"**{losses[best]}**"
        lines += [[group.title, *(losses.get(rate, "") for rate in rates)]] if losses else []
    return markdown_table(["wire", *rates], lines)


def _rate_of(arm: Arm) -> str:
    return arm.name.rpartition(" ")[2]
