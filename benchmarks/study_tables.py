"""Tables and plots of the study's results, written into docs/evidence/experiments.md."""

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from common import RESULTS, ROOT, markdown_table
from study_arms import (
    AFTER_A_FIFTH,
    BF16,
    BF16_WIRE,
    CPU,
    FP32,
    HIGHER_RATE,
    INTERVALS,
    ISLANDS,
    LOCO_ON_BOTH_HOPS,
    NODES,
    Arm,
    Experiment,
    Group,
    every,
    gradients,
)
from study_experiments import E4_BITS_AND_BLOCKS, E4_SENSITIVITY, EXPERIMENTS, MUON_PERIODS, muon_at

from megatron_zpp.zeropp.recipes import RECIPES

PAGE = ROOT / "docs" / "evidence" / "experiments.md"
EXCESS = "validation loss over the fp32 wire, %"
Rows = dict[str, dict[int, dict[str, Any]]]  # by flags, then by seed


def write_page(rows: Rows) -> None:
    """Replace the page's tables, and draw the plots again."""
    PAGE.write_text(page_of(rows))
    draw_plots(rows)


def draw_plots(rows: Rows) -> None:
    plot_without_state(rows)
    plot_loss_over_bytes(rows)
    plot_feedback(rows)
    plot_islands(rows)
    plot_moved_codes(rows)
    plot_curves(rows)


def page_of(rows: Rows) -> str:
    """Return the page with the tables of these results."""
    page = PAGE.read_text()
    for name, experiment in EXPERIMENTS.items():
        if experiment.scale == "cpu":
            page = replace_block(page, name, table(experiment, rows))
    return page


def by_flags_and_seed(rows: list[dict[str, Any]], seeds: Sequence[int] = CPU.seeds) -> Rows:
    """Group rows by flags and seed, and keep the arms that were trained with all ``seeds``."""
    by_flags: Rows = defaultdict(dict)
    for row in rows:
        if row["seed"] in seeds:
            by_flags[row["flags"]][row["seed"]] = row
    return {flags: of_seeds for flags, of_seeds in by_flags.items() if len(of_seeds) == len(seeds)}


def replace_block(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between <!-- NAME --> and <!-- end of NAME -->."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    assert begin in page and end in page, f"the page has no place for {name}"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{text}{end}", page, flags=re.DOTALL)


def table(experiment: Experiment, rows: Rows) -> str:
    """One Markdown table: the groups one below the other."""
    recovers = any(group.recovers for group in experiment.groups)
    observed = experiment.observed
    columns = ["on the wire", "validation loss", f"over {experiment.control}", *["recovered"] * recovers, "bytes"]
    columns += observed
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for group in experiment.groups:
        trained = [arm for arm in group.arms if arm.flags in rows and arm.control in rows]
        if len(trained) < min(2, len(group.arms)):  # nothing to compare
            trained = []
        if trained:
            lines.append(f"| **{group.title}** " + "| " * (len(columns) - 1) + "|")
        lines += [_line(group, arm, rows, recovers, observed) for arm in trained]
    return "\n".join(lines) + "\n"


def table_of_one_seed(experiment: Experiment, rows: list[dict[str, Any]], small: Rows) -> str:
    """E8 and E17: one seed of a larger scale, beside the same arms of the small one where that has three."""
    of_flags = {row["flags"]: row for row in rows if row["seed"] == 1}
    lines = []
    arms = [(group, arm) for group in experiment.groups for arm in group.arms if arm.flags in of_flags]
    for of_group, arm in arms:
        if len(experiment.groups) > 1 and arm is of_group.arms[0]:
            lines.append([f"**{of_group.title}**", "", "", "", ""])
        loss, over, beside = of_flags[arm.flags]["validation_loss"], "", ""
        if arm.flags != arm.control:
            over = f"{100 * (loss / of_flags[arm.control]['validation_loss'] - 1):+.2f} %"
            beside = mean_and_spread(excesses(arm, small), "{:+.2f}", " %") if arm.flags in small else ""
        lines.append([arm.name, f"{loss:.4f}", over, beside, f"{of_flags[arm.flags]['bytes_per_parameter']:.3g}"])
    columns = ["on the wire", "validation loss", f"over {experiment.control}", "small", "bytes"]
    shown = [0, 1, 2, *[3] * any(line[3] for line in lines), 4]
    columns, *lines = ([line[column] for column in shown] for line in (columns, *lines))
    return markdown_table(columns, lines)


def table_of_muon_rates(rows: list[dict[str, Any]]) -> str:
    """E10: losses of Muon over the bf16 wire at each learning rate, seed 1."""
    losses = {row["flags"]: row["validation_loss"] for row in rows if row["seed"] == 1}
    rates = (0.001, 0.002, 0.004, 0.008, 0.016)
    lines = []
    for name in ("whole matrices", "node blocks", "stale rows, every tenth whole in 4 bits"):
        found = [losses.get(f"{BF16_WIRE.flags} {muon_at(rate, MUON_PERIODS[name])}") for rate in rates]
        lines.append([name, *("" if loss is None else f"{loss:.3f}" for loss in found)])
    return markdown_table(["", *map(str, rates)], lines)


def table_of_recipes(rows: Rows) -> str:
    """The recipes, with their arms of E15."""
    measured = {arm.name.partition(":")[0]: arm for group in EXPERIMENTS["E15"].groups for arm in group.arms}
    lines = []
    for name, recipe in RECIPES.items():
        arm = measured.get(name)
        sent = "" if arm is None else f"{next(iter(rows[arm.flags].values()))['bytes_per_parameter']:.2f}"
        llama = "" if arm is None else mean_and_spread(excesses(arm, rows), "{:+.2f}", " %")
        gpt = "" if recipe.loss is None else f"{recipe.loss[0]:+.2f} ± {recipe.loss[1]:.2f} %"
        lines.append([f"`{name}`", recipe.summary, sent, gpt, llama])
    return markdown_table(["recipe", "what it sends", "bytes", "loss, GPT", "loss, Llama"], lines)


def _line(group: Group, arm: Arm, rows: Rows, recovers: bool, observed: Sequence[str]) -> str:
    losses = [row["validation_loss"] for row in rows[arm.flags].values()]
    cells = [arm.name, mean_and_spread(losses, "{:.4f}")]
    cells.append("" if arm.flags == arm.control else mean_and_spread(excesses(arm, rows), "{:+.2f}", " %"))
    if recovers:
        first = group.arms[0]
        shares = recovered(first, arm, rows) if group.recovers and arm != first and first.flags in rows else []
        cells.append(mean_and_spread(shares, "{:.0f}", " %") if shares else "")
    sent = next(iter(rows[arm.flags].values()))["bytes_per_parameter"]
    cells.append(f"{sent:.2f}" if sent >= 0.2 else f"{sent:.3f}")
    for name in observed:
        # The first results have no "observed".
        found = [row.get("observed", {}) for row in rows[arm.flags].values()]
        seen = [of_seed[name] for of_seed in found if name in of_seed]
        cells.append(mean_and_spread(seen, "{:.2f}") if seen else "")
    return f"| {' | '.join(cells)} |"


def excesses(arm: Arm, rows: Rows) -> list[float]:
    """Percent of loss over the control's, seed by seed: both saw the same data in the same order."""
    control = rows[arm.control]
    return [
        100 * (row["validation_loss"] / control[seed]["validation_loss"] - 1)
        for seed, row in sorted(rows[arm.flags].items())
    ]


def recovered(first: Arm, arm: Arm, rows: Rows) -> list[float]:
    """Percent of the first arm's excess over the control that ``arm`` does not have, seed by seed.

    Nothing where the first arm's excess is not twice its spread: there is no loss to win back.
    """
    lost = excesses(first, rows)
    if statistics.mean(lost) < 2 * statistics.stdev(lost):
        return []
    return [100 * (1 - ours / theirs) for ours, theirs in zip(excesses(arm, rows), lost, strict=True)]


def mean_and_spread(values: list[float], form: str, unit: str = "") -> str:
    """ "mean ± standard deviation"."""
    return f"{form.format(statistics.mean(values))} ± {statistics.stdev(values):.2g}{unit}"


def _means_and_spreads(arms: Sequence[Arm], rows: Rows) -> tuple[list[float], list[float]]:
    found = [excesses(arm, rows) for arm in arms]
    return [*map(statistics.mean, found)], [*map(statistics.stdev, found)]


def _trained(arms: Iterable[Arm], rows: Rows) -> list[Arm]:
    return [arm for arm in arms if arm.flags in rows]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_without_state(rows: Rows) -> None:
    """E1, E2 and E3: low-bit weights, their differences, and low-bit gradients, arm by arm."""
    plt = _pyplot()
    from matplotlib.ticker import FixedLocator

    weights, differences = (EXPERIMENTS[name].groups[1].arms for name in ("E1", "E2"))
    sides = {"weights": (*weights, *differences[1:]), "gradients": EXPERIMENTS["E3"].groups[1].arms}
    figure, both = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for axes, (title, arms) in zip(both, sides.items(), strict=True):
        trained = _trained(arms, rows)
        means, spreads = _means_and_spreads(trained, rows)
        axes.barh([arm.name for arm in trained], means, xerr=spreads, color="C0", capsize=3)
        axes.invert_yaxis()
        axes.set_xscale("symlog", linthresh=0.1, linscale=0.5)
        axes.xaxis.set_major_locator(FixedLocator([-0.1, 0, 0.1, 1, 10]))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=title, xlabel=EXCESS)
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(RESULTS / "study_without_state.png", dpi=130)


def plot_loss_over_bytes(rows: Rows) -> None:
    """The whole recipes, by name. Those with equal bytes stand side by side."""
    figure, axes = _pyplot().subplots(figsize=(9, 6.5), layout="constrained")
    arms = [arm for group in EXPERIMENTS["E5"].groups for arm in _trained(group.arms, rows) if arm != FP32]
    drawn: list[float] = []  # bytes
    for i, (arm, mean, spread) in enumerate(zip(arms, *_means_and_spreads(arms, rows), strict=True)):
        sent = float(next(iter(rows[arm.flags].values()))["bytes_per_parameter"])
        x = sent * 1.035 ** sum(abs(sent / other - 1) < 0.02 for other in drawn)
        drawn.append(sent)
        axes.errorbar(x, mean, spread, color=f"C{i % 10}", fmt="os^"[i // 5], capsize=3, label=f"{i + 1}: {arm.name}")
        place: dict[str, Any] = dict(textcoords="offset points", xytext=(0, 4))
        axes.annotate(str(i + 1), (x, mean + spread), fontsize=9, ha="center", **place)
    axes.set_xlabel("bytes that a node sends per parameter and step; points with equal bytes stand side by side")
    axes.set_ylabel(EXCESS)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(RESULTS / "study_loss_over_bytes.png", dpi=130)


def plot_feedback(rows: Rows) -> None:
    """What error feedback and LoCo do to the excess, and how it depends on beta."""
    figure, (bars, curve) = _pyplot().subplots(1, 2, figsize=(12, 4.2), width_ratios=[3, 2])
    for j, name in enumerate(("nothing", "error feedback", "LoCo")):
        drawn = [(i, group.arms[j]) for i, group in enumerate(E4_BITS_AND_BLOCKS) if group.arms[j].flags in rows]
        heights, spreads = _means_and_spreads([arm for _, arm in drawn], rows)
        bars.bar([i + 0.27 * (j - 1) for i, _ in drawn], heights, 0.25, yerr=spreads, color=f"C{j}", label=name)
    bars.set_xticks(range(len(E4_BITS_AND_BLOCKS)))
    bars.set_xticklabels([group.title.replace(", ", ",\n") for group in E4_BITS_AND_BLOCKS], fontsize=7)
    bars.set_ylabel(EXCESS)
    bars.legend(fontsize=8)
    nothing, *others = E4_SENSITIVITY.arms
    named = [(re.fullmatch(r"beta ([\d.]+)( \(error feedback\))?", arm.name), arm) for arm in _trained(others, rows)]
    betas = {float(match[1]): arm for match, arm in named if match}
    if betas and nothing.flags in rows:
        curve.errorbar([*betas], *_means_and_spreads([*betas.values()], rows), fmt="o-", capsize=3)
        curve.axhline(statistics.mean(excesses(nothing, rows)), color="grey", ls="--", label="nothing")
        curve.set(xlabel="beta, 8 bits within and 2 between nodes, blocks of 128", ylim=(0, None))
        curve.set_ylabel(EXCESS)
        curve.legend(fontsize=8)
    for axes in (bars, curve):
        axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(RESULTS / "study_feedback.png", dpi=130)


def _how(arm: Arm) -> str:
    return "in fragments" if "fragments" in arm.name else AFTER_A_FIFTH if AFTER_A_FIFTH in arm.name else ""


def plot_islands(rows: Rows) -> None:
    """E11: ZeRO++, whose nodes send at every step, and islands, by what leaves one of them."""
    plt = _pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(9, 6.5), layout="constrained")

    def draw(arms: list[Arm], label: str, **style: Any) -> None:
        if arms:
            sent = [rows[arm.flags][1]["bytes_per_parameter"] for arm in arms]
            axes.errorbar(sent, *_means_and_spreads(arms, rows), capsize=3, label=label, **style)

    every_step = _trained(EXPERIMENTS["E11"].groups[1].arms, rows)
    draw(every_step, "ZeRO++ with LoCo, every step", fmt="k*", markersize=10)
    fills = {"": "full", "in fragments": "none", AFTER_A_FIFTH: "top"}
    for marker, (number, group) in zip("os", ISLANDS.items(), strict=True):
        for (color, interval), (how, fill) in itertools.product(enumerate(INTERVALS), fills.items()):
            arms = [
                arm
                for arm in _trained(group.arms, rows)
                if arm.name.startswith(f"{every(interval)}, ") and "momentum" not in arm.name and how == _how(arm)
            ]
            label = ", ".join(filter(None, (f"{number} islands", every(interval), how)))
            draw(arms, label, color=f"C{color}", fmt=marker, alpha=0.8, fillstyle=fill)
    axes.axhline(0, color="0.4", linewidth=1)
    if HIGHER_RATE.flags in rows:
        best = statistics.mean(excesses(HIGHER_RATE, rows))
        axes.axhline(best, color="0.4", linewidth=1, linestyle="--", label="fp32 wire at its best learning rate")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes that leave a node, or an island, per parameter and step")
    axes.set_ylabel(EXCESS)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    figure.savefig(RESULTS / "study_islands.png", dpi=130)


def plot_moved_codes(rows: Rows) -> None:
    """E12: bits that a moved weight takes between nodes, over the schedule of the learning rate."""
    figure, axes = _pyplot().subplots(figsize=(7, 4), layout="constrained")
    for_gradients, per_weight = 6.0, 8 * NODES  # bytes in each step, in fp32; a node sends the rest of its own shards
    for arm in _trained(EXPERIMENTS["E12"].groups[1].arms, rows):
        # The first interval sends all in full.
        of_seeds = [row.get("bytes_of_intervals", [])[1:] for row in rows[arm.flags].values()]
        if all(of_seeds):
            bits = [per_weight * (statistics.mean(sent) - for_gradients) for sent in zip(*of_seeds, strict=True)]
            axes.plot([20 * (i + 1) for i in range(len(bits))], bits, label=arm.name)
    axes.set(xlabel="step", ylabel="bits per weight and step between nodes", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / "study_moved_codes.png", dpi=130)


def plot_curves(rows: Rows) -> None:
    """Training loss over steps, and what each wire adds to the fp32 wire's: the papers' curves, mean of the seeds."""
    large, blocked = (gradients(4, 4, block_size) for block_size in (4096, 128))
    arms = {
        "ZeRO-3, fp32 wire": FP32.flags,
        "ZeRO-3, bf16 wire": BF16_WIRE.flags,
        "4-bit gradients, one scale (non-blocked)": f"{BF16} {gradients(4, 4, 0)}",
        "4-bit gradients, blocks of 4096": f"{BF16} {large}",
        "4-bit gradients, blocks of 4096, LoCo": f"{BF16} {large} {LOCO_ON_BOTH_HOPS}",
        "4-bit gradients, blocks of 128": f"{BF16} {blocked}",
    }
    figure, (losses, excess) = _pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    curves = {
        name: [
            statistics.mean(values)
            for values in zip(*(row["train_losses"] for row in rows[flags].values()), strict=True)
        ]
        for name, flags in arms.items()
        if flags in rows
    }
    fp32 = curves["ZeRO-3, fp32 wire"]
    for name, curve in curves.items():
        steps = [20 * i for i in range(1, len(curve))]
        losses.plot(steps, curve[1:], label=name)
        excess.plot(steps, [100 * (loss / first - 1) for loss, first in zip(curve[1:], fp32[1:], strict=True)])
    losses.set(xlabel="step", ylabel="training loss", ylim=(None, 6.5))
    excess.set(xlabel="step", ylabel="training loss over the fp32 wire, %")
    losses.legend(fontsize=8)
    for axes in (losses, excess):
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "study_curves.png", dpi=130)
