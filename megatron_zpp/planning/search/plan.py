"""Predict every candidate on a cluster, and rank those that fit."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.families import Architecture
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.division import PlannedModel, RankGrid, plan_model
from megatron_zpp.planning.needs.estimate import Estimate, estimate
from megatron_zpp.planning.predict import Prediction, island_cluster, predict
from megatron_zpp.planning.search.candidates import (
    MICRO_BATCH_SIZES,
    RECOMPUTATIONS,
    Layout,
    Wire,
    is_settled,
    layouts,
    wires,
)
from megatron_zpp.settings.checks import SettingsError
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.recipes import LOSS_BUDGET

USABLE = 0.9  # share of a GPU's memory; CUDA and NCCL take the rest, or it is lost between blocks

# Flags that the trainer requires but no plan depends on, each with those that replace it.
FILLED_IN = (
    (("--train-iters", "--train-samples", "--train-tokens"), "--train-iters 1000"),
    (("--lr",), "--lr 1e-4"),
    (
        ("--data-path", "--train-data-path", "--mock-data", "--data-args-path", "--per-split-data-args-path"),
        "{data}",
    ),
    (("--tokenizer-type", "--vocab-file"), "--tokenizer-type NullTokenizer --vocab-size {vocabulary}"),
)


@dataclass(frozen=True)
class Candidate:
    """A way to send weights and gradients in a layout."""

    wire: Wire
    layout: Layout
    flags: str  # added to the user's

    @property
    def name(self) -> str:
        return f"{self.wire.name}, {self.layout.name}"


@dataclass(frozen=True)
class Outcome:
    """A candidate that fits, with its fastest micro-batch size and recomputation."""

    candidate: Candidate
    recompute: str
    prediction: Prediction
    flags: str  # all that the user's command still needs


@dataclass(frozen=True)
class Refused:
    candidate: Candidate
    reason: str
    error: ValueError | None = None  # None: it does not fit


@dataclass(frozen=True)
class Plan:
    cluster: Cluster
    outcomes: list[Outcome]  # fastest first
    refused: list[Refused]
    loss_budget: float = LOSS_BUDGET  # percent that the suggested one may cost

    @property
    def allowed(self) -> list[Outcome]:
        """The outcomes within the budget, fastest first; all of them if there is none."""
        risks = (outcome.candidate.wire.recipe.risk for outcome in self.outcomes)
        within = [outcome for outcome, risk in zip(self.outcomes, risks, strict=True) if risk <= self.loss_budget]
        return within or self.outcomes


def complete(flags: Sequence[str], stated: set[str], cluster: Cluster, vocabulary: int) -> tuple[list[str], list[str]]:
    """Add the flags that a plan needs. Return all flags, and the added ones that the user's command needs, too."""
    added = [] if {"--bf16", "--fp16"} & stated else ["--bf16"]
    if "--global-batch-size" not in stated:
        added += ["--global-batch-size", str(cluster.world_size)]
    return [*filled_in(flags, stated, vocabulary), *added], added


def filled_in(flags: Sequence[str], stated: set[str], vocabulary: int) -> list[str]:
    """Add what the trainer requires but no estimate depends on: data, tokenizer, learning rate, and a length.

    stated: as ``stated_flags`` returns them.
    """
    missing = " ".join(typed for names, typed in FILLED_IN if not stated.intersection(names))
    data = "--train-data-path chats" if "--sft" in stated else "--mock-data"
    return [*flags, *missing.format(vocabulary=vocabulary, data=data).split()]


def make_plan(
    architecture: Architecture, flags: Sequence[str], vocabulary: int, cluster: Cluster, usable: float = USABLE
) -> Plan:
    """Predict all candidates. usable: share of a GPU's memory. Raises ValueError if the flags leave no candidate."""
    stated = stated_flags(architecture, flags)
    words, added = complete(flags, stated, cluster, vocabulary)
    plan = Plan(cluster, [], [])
    models: dict[RankGrid, PlannedModel] = {}  # planned once for all settings that divide it alike

    def parse(typed: str) -> ResolvedSettings:
        given = [*words, *typed.split()]
        all_ranks, of_node = cluster.world_size, cluster.gpus_per_node
        return parse_settings(architecture, given, all_ranks, lambda _: None, ranks_per_node=of_node)

    def count(typed: str) -> Estimate:
        settings = parse(typed)
        grid = RankGrid(cluster.nodes, cluster.gpus_per_node, settings.distributed)
        if grid not in models:
            whole = next((planned.whole for planned in models.values()), None)
            models[grid] = plan_model(architecture, whole or architecture.build_model(settings.model, vocabulary), grid)
        return estimate(architecture, settings, vocabulary, grid, cluster.ring_passes, models[grid])

    settings = parse("" if is_settled("micro-batch", stated) else "--micro-batch-size 1")
    island = island_cluster(settings, cluster)
    for layout in layouts(island, settings.model, settings.training.seq_length, stated):
        for wire, typed in wires(island, layout, stated):
            candidate = Candidate(wire, layout, f"{typed} {layout.flags}".strip())
            found = _predict_fastest(candidate, count, stated, cluster, usable * cluster.memory_gb * 1e9)
            if isinstance(found, Refused):
                plan.refused.append(found)
            else:
                plan.outcomes.append(dataclasses.replace(found, flags=" ".join([*added, *found.flags.split()])))
    errors = [refusal.error for refusal in plan.refused if isinstance(refusal.error, SettingsError)]
    if errors and len(errors) == len(plan.refused) and not plan.outcomes:
        raise errors[0]
    plan.outcomes.sort(key=lambda outcome: -outcome.prediction.tokens_per_second)
    return plan


def _predict_fastest(
    candidate: Candidate, count: Callable[[str], Estimate], stated: set[str], cluster: Cluster, usable_bytes: float
) -> Outcome | Refused:
    """Choose the fastest micro-batch size, and the least recomputation that fits."""
    best: Outcome | None = None
    least: int | None = None  # bytes
    first_error: ValueError | None = None
    sizes = [""] if is_settled("micro-batch", stated) else [f"--micro-batch-size {n}" for n in MICRO_BATCH_SIZES]
    recomputations = {"": "as given"} if is_settled("recompute", stated) else RECOMPUTATIONS
    for size in sizes:
        for recompute, name in recomputations.items():
            typed = f"{candidate.flags} {size} {recompute}".strip()
            try:
                needs = count(typed)
            except ValueError as error:
                first_error = first_error or error
                continue
            least = needs.memory if least is None else min(least, needs.memory)
            if needs.memory <= usable_bytes:
                prediction = predict(cluster, needs)
                if best is None or prediction.time.seconds < best.prediction.time.seconds:
                    best = Outcome(candidate, name, prediction, typed)
                break
    if best is not None:
        return best
    if least is not None:
        reason = f"needs {least / 1e9:.0f} GB of a GPU's {usable_bytes / 1e9:.0f} that can be used"
        return Refused(candidate, reason)
    return Refused(candidate, str(first_error).splitlines()[0], first_error)
