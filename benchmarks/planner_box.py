"""The planner's predictions beside the cluster in a box: ``planner.py box`` measures, ``compare`` shows both.

It calibrates on 2 nodes x 2 ranks over an unlimited link with ``tools/plan.py --measure``, then trains two models over
links of several rates with several settings. What is in ``results/planner_box.jsonl`` is not measured again.
"""

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import against_peers as race
from common import ALL_FLAGS, RESULTS, ROOT, markdown_table, measure_once, read_rows

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.planning.auto import choose, predict_recipes
from megatron_zpp.planning.cluster import Cluster, read_cluster
from megatron_zpp.planning.predict import estimate_on, predict
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.recipes import LOSS_BUDGET, RECIPES

MEASURED = RESULTS / "planner_box.jsonl"
CLUSTER = RESULTS / "planner_box.toml"
NODES = 2
RANKS = 2  # per node
COMMON = (
    "--seq-length 256 --micro-batch-size 1 --mock-data --vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-4 --eval-iters 0 --log-interval 1 --num-workers 0 --bf16 --grad-reduce-in-bf16"
)
MODELS = {
    "26M": f"--num-layers 8 --hidden-size 512 --num-attention-heads 8 {COMMON}",
    "7M": f"--num-layers 8 --hidden-size 256 --num-attention-heads 4 {COMMON}",
}
SETTINGS = {
    "ZeRO-3": "--zeropp-ranks-per-node 2",
    "all flags": ALL_FLAGS,
    "all flags, moves": f"{ALL_FLAGS} --zeropp-weight-moves",
}
RATES = (300, 1000, 4000)  # Mbit/s
STEPS = {1: 14, 4: 6}  # by micro-batches, the first three of which are not measured
HEADERS = 1514 / 1448  # bytes of an Ethernet frame over its payload's; tc counts frames
VOCABULARY = 1024  # the 1023 and the end of a document


def measure() -> None:
    from cluster_in_a_box import check_requirements, measure_box, run

    check_requirements()
    if not CLUSTER.exists():
        measure_box(CLUSTER, NODES, RANKS, 512, 256)  # the larger model's sizes
    for model, micro_batches, rate, setting in itertools.product(MODELS, STEPS, RATES, SETTINGS):
        flags = f"{MODELS[model]} {SETTINGS[setting]} --global-batch-size {NODES * RANKS * micro_batches} "
        flags += f"--train-iters {STEPS[micro_batches]}"
        arguments = [str(ROOT / "pretrain_gpt.py"), *flags.split()], NODES, RANKS, f"{rate}mbit", 2, 1800, False

        def measured(flags: str = flags, arguments: Any = arguments) -> dict[str, Any]:
            return {"seconds": run(*arguments).seconds_per_step, "flags": flags}

        key = {"model": model, "setting": setting, "micro_batches": micro_batches, "mbit": rate}
        if row := measure_once(MEASURED, key, measured):
            print(f"{key}: {row['seconds']:.3f} s, predicted {predicted_seconds(row):.3f} s", flush=True)


def predicted_seconds(row: dict[str, Any]) -> float:
    """Seconds of a step."""
    cluster = box_at(row["mbit"])
    settings = parse_settings(GPT, row["flags"].split(), cluster.world_size, note=lambda _: None)
    return predict(cluster, estimate_on(cluster, GPT, settings, VOCABULARY)).time.seconds


def box_at(mbit: float, box: Path = CLUSTER) -> Cluster:
    measured = read_cluster(box)
    return dataclasses.replace(measured, between_gbits=min(measured.between_gbits, mbit / 1000 / HEADERS))


def table_of_auto() -> str:
    """Set what auto would choose beside the best of ours and the best peer: medians over turns in which both ran."""
    mbits, lines = {None: float("inf"), "1gbit": 1000.0, "100mbit": 100.0}, []
    refused = tuple(name for name, recipe in RECIPES.items() if recipe.risk > LOSS_BUDGET)
    for rate, n in race.SHOWN:

        def parse(choice: str, ranks: int, n: int = n) -> ResolvedSettings:
            flags = f"{MODELS['26M']} --global-batch-size {NODES * RANKS * n} --train-iters 9 --zeropp {choice}"
            words = [*flags.split(), "--zeropp-ranks-per-node", str(ranks)]
            return parse_settings(GPT, words, NODES * RANKS, note=lambda _: None)

        cluster = box_at(mbits[rate], race.BOX)
        choice = choose(predict_recipes((cluster, cluster), GPT, parse, VOCABULARY)[0], LOSS_BUDGET)
        recipe, stage, copies = choice.split()[:3]
        # "Kept" is stage 1, and with one micro-batch also stage 2; on each card no stage gathers anything.
        is_kept = stage != "--zero-stage=3" or "card" in copies
        taken = recipe.replace("zero3", "FSDP2") + " on each card" * ("card" in copies) + race.KEPT * is_kept
        known = [setting for setting in race.SETTINGS if not setting.startswith(refused)]
        ratios = {setting: race.ratios(taken, setting, rate=rate, micro_batches=n) for setting in known}
        lines.append([race.cell_name(rate, n), f"`{recipe} {stage} {copies}`", taken])
        for others in ({*race.OURS} - {taken}, {*race.SETTINGS} - {*race.OURS, taken}):
            best = max(others & ratios.keys(), key=lambda s: statistics.median(ratios[s]))
            lines[-1] += [best, race.median_of_turns(ratios[best])]
    return markdown_table(["", "auto", "measured as", "best of ours", "ratio", "best peer", "ratio"], lines)


def predicted_rows() -> list[tuple[dict[str, Any], float]]:
    """Return the kept rows, each with its predicted seconds."""
    rows = [row for row in read_rows(MEASURED) if row["setting"] in SETTINGS]  # without formats that are gone
    if not rows:
        raise SystemExit("nothing is measured yet: run `planner.py box` first, as root on an idle machine")
    return [(row, predicted_seconds(row)) for row in rows]


def table() -> str:
    """Errors of all points, and of pairs that differ by more than a tenth the share whose order is predicted."""
    rows = predicted_rows()
    lines, errors = [], []
    for row, seconds in rows:
        off = seconds / row["seconds"] - 1
        where = (row[name] for name in ("model", "setting", "micro_batches", "mbit"))
        lines.append([*where, f"{row['seconds']:.3f}", f"{seconds:.3f}", f"{off:+.1%}"])
        errors.append(abs(off))
    headings = ("model", "setting", "micro-batches", "Mbit/s", "measured, s", "predicted, s", "off by")
    said = f"{len(rows)} points: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}."
    same = ("model", "micro_batches", "mbit")
    pairs = [
        (a["seconds"] < b["seconds"]) == (of_a < of_b)
        for (a, of_a), (b, of_b) in itertools.combinations(rows, 2)
        if all(a[name] == b[name] for name in same)
        and max(a["seconds"], b["seconds"]) > 1.1 * min(a["seconds"], b["seconds"])
    ]
    said += f" Which setting is faster: right in {sum(pairs)} of {len(pairs)} pairs that differ by more than 10 %."
    return f"{said}\n\n{markdown_table(headings, lines)}"
