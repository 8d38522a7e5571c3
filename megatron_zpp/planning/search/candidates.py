"""What a planner tries: how weights and gradients are sent, how ranks are divided, micro-batches, recomputation.

Each is a piece of the trainer's command line, so that the trainer's checks refuse what is impossible, and say why.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.settings.checks import divisors
from megatron_zpp.settings.resolved import ResolvedModel
from megatron_zpp.zeropp.recipes import RECIPES, Recipe

RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Wire:
    """A way to send weights and gradients: a recipe, and flags of the trainer. {N}: nodes."""

    name: str
    flags: str
    recipe: Recipe = RECIPES["zero3"]

    @property
    def rank(self) -> int:
        """The place among all, which round more and more; 0 for what the user gave."""
        return WIRES.index(self) if self in WIRES else 0


def _recipe(name: str, more: str = "") -> Wire:
    return Wire(f"{name}{', int8 sums' if more else ''}", f"--zeropp {name} {more}".strip(), RECIPES[name])


WIRES = (
    Wire("ZeRO-3", ""),
    Wire("HSDP", "--num-distributed-optimizer-instances {N}"),
    _recipe("lossless"),
    _recipe("int8"),
    _recipe("int8", "--zeropp-gradient-sum-dtype int8"),  # for memory; no measurable loss: E6
    _recipe("int6"),
    _recipe("ternary"),
)
RECOMPUTATIONS = {"": "nothing", "--recompute-activations": "selective", RECOMPUTE_ALL: "all"}
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SIZES = (1, 2, 4, 8)  # of tensor and context parallelism and of pipelines
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


# A stated flag with one of these prefixes settles a question: then only the user's answer is tried.
SETTLES = {
    "wire": ("--zero-", "--zeropp", "--hpz", "--num-distributed-optimizer-instances", "--cpu-offload "),
    "layout": ("--tensor-model", "--pipeline-model", "--context-parallel", "--expert-model"),
    "recompute": ("--recompute", "--cpu-offloading"),
    "micro-batch": ("--micro-batch-size",),
}
SETTLES_NOTHING = ("--zeropp-redecide", "--zeropp-loss-budget", "--zeropp-monitor-interval", "--zeropp-check-agreement")


def is_settled(question: str, stated: Collection[str]) -> bool:
    return any(f"{flag} ".startswith(SETTLES[question]) for flag in stated if flag not in SETTLES_NOTHING)


def wires(cluster: Cluster, layout: Layout, stated: Collection[str]) -> Iterator[tuple[Wire, str]]:
    """Yield the ways that make sense for the layout on the cluster, and their flags."""
    if is_settled("wire", stated):
        yield Wire("as given", ""), ""
        return
    nodes = max(1, cluster.nodes // layout.pipeline)  # of a pipeline stage
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
