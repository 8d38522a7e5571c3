"""Try every way to send, divide and recompute on a cluster, predict each, and rank those that fit.

A candidate is a piece of the trainer's command line, so that the trainer's checks refuse what is impossible, and say
why.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.families import Architecture
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.division import PlannedModel, RankGrid, plan_model
from megatron_zpp.planning.needs.estimate import Estimate, estimate
from megatron_zpp.planning.predict import Prediction, island_cluster, predict
from megatron_zpp.settings.checks import SettingsError, divisors
from megatron_zpp.settings.groups import all_flags, flags_by_name
from megatron_zpp.settings.resolved import ResolvedModel, ResolvedSettings
from megatron_zpp.zeropp.recipes import DEFAULT, LOSS_BUDGET, RECIPES, Recipe

RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Wire:
    """A way to send weights and gradients: a recipe, and flags of the trainer. {N}: nodes."""

    name: str
    flags: str
    recipe: Recipe = RECIPES["zero3"]

    @property
    def rank(self) -> int:
        """The place among all, which round more and more; 0 for what rounds nothing, or what the user gave."""
        return WIRES.index(self) if self in WIRES and self.recipe.loss is not None else 0


def _wires_of(recipe: Recipe) -> Iterator[Wire]:
    flags = f"--zeropp {recipe.name}"
    yield Wire(recipe.name, flags, recipe)
    if recipe.name == DEFAULT:  # for memory; loss +0.00 ± 0.05 % (results/old/study.jsonl)
        yield Wire(f"{recipe.name}, int8 sums", f"{flags} --zeropp-gradient-sum-dtype int8", recipe)


WIRES = (
    Wire("ZeRO-3", ""),
    Wire("HSDP", "--num-distributed-optimizer-instances {N}"),
    *(wire for recipe in RECIPES.values() if recipe.fields for wire in _wires_of(recipe)),
)
RECOMPUTATIONS = {"": "nothing", "--recompute-granularity selective": "selective", RECOMPUTE_ALL: "all"}
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SIZES = (1, 2, 4, 8)  # tried for tensor, context and pipeline parallelism
SHORTEST_PART = 8192  # tokens of a sequence that a context-parallel rank has at least


@dataclass(frozen=True)
class Layout:
    """The parallel sizes. Tensor parallelism also divides sequences between linear layers."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    experts: int = 1

    @property
    def name(self) -> str:
        sizes = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "EP": self.experts}
        return " ".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1) or "data"

    @property
    def flags(self) -> str:
        kinds = {"tensor-model": self.tensor, "context": self.context, "pipeline-model": self.pipeline}
        kinds["expert-model"] = self.experts
        words = [f"--{kind}-parallel-size {size}" for kind, size in kinds.items() if size > 1]
        return " ".join([*words, *(["--sequence-parallel"] if self.tensor > 1 else [])])


def is_settled(question: str, stated: Collection[str]) -> bool:
    """Return whether a ``stated`` flag settles a question of ``Flag.settles``, so that only its answer is tried."""
    flags = flags_by_name()
    return any(flags[name].settles == question for name in stated if name in flags)


def wires(cluster: Cluster, layout: Layout, stated: Collection[str]) -> Iterator[tuple[Wire, str]]:
    """Yield the ways that make sense for the layout on the cluster, and their flags."""
    if is_settled("wire", stated):
        yield Wire("as given", ""), ""
        return
    nodes = max(1, cluster.nodes // layout.pipeline)  # per pipeline stage
    for wire in WIRES if nodes > 1 else WIRES[:1]:
        yield wire, wire.flags.format(N=nodes)


def layouts(cluster: Cluster, model: ResolvedModel, seq_length: int, stated: Collection[str]) -> Iterator[Layout]:
    """Yield layouts that keep a layer's collectives within a node, and give a pipeline stage whole nodes.

    Only long sequences are divided. Experts are divided within or over whole nodes, if a tensor or pipeline size is 1.
    """
    if is_settled("layout", stated):
        yield Layout()
        return
    groups = model.num_query_groups or model.num_attention_heads
    for tensor, context, pipeline in itertools.product(SIZES, SIZES, SIZES):
        fits = cluster.gpus_per_node % (tensor * context) == 0 and cluster.nodes % pipeline == 0
        divides = groups % tensor == 0 and model.num_layers % pipeline == 0 and (model.num_experts or 0) % tensor == 0
        is_long = context == 1 or seq_length // context >= SHORTEST_PART
        if fits and divides and is_long:
            yield Layout(tensor, context, pipeline)
            if model.num_experts and context == 1 and 1 in (tensor, pipeline):
                per_node = cluster.gpus_per_node // tensor  # ranks with the same part of layers
                for experts in divisors(model.num_experts // tensor)[1:]:
                    lies_evenly = per_node % experts == 0 or experts % per_node == 0
                    if lies_evenly and per_node * cluster.nodes // pipeline % experts == 0:
                        yield Layout(tensor, context, pipeline, experts)


USABLE = 0.9  # share of a GPU's memory; CUDA and NCCL take the rest, or it is lost between blocks


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
    given = {flag.in_plans for flag in all_flags().values() if flag.name in stated}
    missing = dict.fromkeys(flag.in_plans for flag in all_flags().values() if flag.in_plans not in given)
    data = "--train-data-path chats" if "--sft" in stated else "--mock-data"
    return [*flags, *" ".join(missing).format(vocabulary=vocabulary, data=data).split()]


def make_plan(
    architecture: Architecture, flags: Sequence[str], vocabulary: int, cluster: Cluster, usable: float = USABLE
) -> Plan:
    """Predict all candidates. usable: share of a GPU's memory. Raises ValueError if the flags leave no candidate."""
    stated = stated_flags(architecture, flags)
    words, added = complete(flags, stated, cluster, vocabulary)
    plan = Plan(cluster, [], [])
    models: dict[RankGrid, PlannedModel] = {}  # planned once for all settings that divide it in the same way

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
        return Refused(candidate, f"needs {least / 1e9:.0f} GB of a GPU's {usable_bytes / 1e9:.0f} that can be used")
    return Refused(candidate, str(first_error).splitlines()[0], first_error)
