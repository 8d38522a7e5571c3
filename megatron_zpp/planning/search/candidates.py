"""What a planner tries: how weights and gradients travel, how ranks are divided, micro-batches, recomputation.

Each is a piece of the trainer's command line, so that the trainer's own checks say what cannot be, and why.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.search.recipes import (
    DIFFERENCES,
    HPZ,
    INT8_STATE,
    LOCO,
    QUANTIZED,
    TWO_BIT_DIFFERENCES,
    TWO_BITS,
    WARMUP,
)
from megatron_zpp.settings.checks import divisors
from megatron_zpp.settings.resolved import ResolvedModel

ALL_FLAGS = f"{QUANTIZED} {HPZ} {LOCO}"
RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Travel:
    """A way for weights and gradients to travel. flags: with {P} data-parallel ranks of a node, and {N} nodes."""

    name: str
    flags: str
    # What it does to the loss, in percent over a wire of fp32, and the spread over three seeds: the nearest recipe of
    # docs/experiments.md, E5, on a GPT of 1.3 million parameters. None: nothing is rounded below 16 bits.
    loss: tuple[float, float] | None = None

    @property
    def place(self) -> int:
        """Among all ways, of which the later ones round more; what the user gave is alone."""
        return TRAVELS.index(self) if self in TRAVELS else 0

    @property
    def risk(self) -> float:
        """What one may have to expect of the loss, in percent: the mean and its spread together."""
        return sum(self.loss) if self.loss is not None else 0.0


TRAVELS = (  # from what rounds nothing to what rounds most
    Travel("ZeRO-3", ""),
    Travel("HSDP", "--num-distributed-optimizer-instances {N}"),
    Travel("hpZ", HPZ),
    Travel("all flags", ALL_FLAGS, loss=(0.15, 0.19)),
    Travel("all flags, int4 differences", f"{ALL_FLAGS} {DIFFERENCES}", loss=(0.08, 0.13)),
    Travel("all flags, int4 differences, int8 state", f"{ALL_FLAGS} {DIFFERENCES} {INT8_STATE}", loss=(0.08, 0.13)),
    Travel(
        "all flags, int4 differences, 2-bit gradients",
        f"{ALL_FLAGS} {DIFFERENCES} {TWO_BITS} {WARMUP}",
        loss=(-0.06, 0.13),
    ),
    Travel("all flags, 2 bits", f"{ALL_FLAGS} {TWO_BITS} {WARMUP} {TWO_BIT_DIFFERENCES}", loss=(0.23, 0.14)),
)
RECOMPUTATIONS = {"": "nothing", "--recompute-activations": "selective", RECOMPUTE_ALL: "all"}
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SIZES = (1, 2, 4, 8)  # of tensor and context parallelism and of pipelines
SHORTEST_PART = 8192  # tokens of a sequence that a context-parallel rank has


@dataclass(frozen=True)
class Layout:
    """How many ranks divide what. Tensor parallelism divides sequences, too, between linear layers."""

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
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--context-parallel-size": self.context,
            "--pipeline-model-parallel-size": self.pipeline,
            "--expert-model-parallel-size": self.experts,
        }
        words = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        return " ".join([*words, *(["--sequence-parallel"] if self.tensor > 1 else [])])


# A flag with one of these beginnings settles a question: then only what the user says is tried.
SETTLES = {
    "travel": ("--zero-", "--zeropp", "--hpz", "--num-distributed-optimizer-instances", "--cpu-offload"),
    "layout": ("--tensor-model", "--pipeline-model", "--context-parallel", "--expert-model"),
    "recompute": ("--recompute",),
    "micro-batch": ("--micro-batch-size",),
}


def is_settled(question: str, flags: Sequence[str]) -> bool:
    return any(flag.startswith(SETTLES[question]) for flag in flags)


def travels(cluster: ClusterSpec, layout: Layout, flags: Sequence[str], steps: int) -> Iterator[tuple[Travel, str]]:
    """The ways that make sense for the layout on the cluster, and their flags."""
    if is_settled("travel", flags):
        yield Travel("as given", ""), ""
        return
    nodes = max(1, cluster.nodes // layout.pipeline)  # of a pipeline's stage
    ranks = cluster.gpus_per_node // layout.tensor  # of a node that share parameters
    places = {"P": ranks, "N": nodes, "warmup": max(1, steps // 10)}
    for travel in TRAVELS:
        has_levels = nodes > 1 and (ranks > 1 or "{P}" not in travel.flags)
        if has_levels or not travel.flags:
            yield travel, travel.flags.format(**places)


def layouts(cluster: ClusterSpec, model: ResolvedModel, seq_length: int, flags: Sequence[str]) -> Iterator[Layout]:
    """Those that keep what travels within a layer inside of a node, and whole nodes in a pipeline's stage.

    Sequences are divided where they are long. Experts are divided within nodes or over whole ones, beside tensor
    parallelism or beside a pipeline.
    """
    if is_settled("layout", flags):
        yield Layout()
        return
    groups = model.num_query_groups or model.num_attention_heads
    for tensor, context, pipeline in itertools.product(SIZES, SIZES, SIZES):
        fits = cluster.gpus_per_node % (tensor * context) == 0 and cluster.nodes % pipeline == 0
        divides = groups % tensor == 0 and model.num_layers % pipeline == 0 and (model.num_experts or 0) % tensor == 0
        is_long = context == 1 or seq_length // context >= SHORTEST_PART
        if fits and divides and is_long:
            layout = Layout(tensor, context, pipeline)
            yield layout
            if model.num_experts and context == 1 and 1 in (tensor, pipeline):
                yield from _with_experts_divided(cluster, model.num_experts, layout)


def _with_experts_divided(cluster: ClusterSpec, num_experts: int, layout: Layout) -> Iterator[Layout]:
    """Among ranks of one node, or all of several nodes, that have the same part of layers."""
    per_node = cluster.gpus_per_node // layout.tensor
    ranks = per_node * cluster.nodes // layout.pipeline
    for experts in divisors(num_experts // layout.tensor)[1:]:
        if ranks % experts == 0 and (per_node % experts == 0 or experts % per_node == 0):
            yield dataclasses.replace(layout, experts=experts)
