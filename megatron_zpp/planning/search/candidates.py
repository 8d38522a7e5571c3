"""What a planner tries: how weights and gradients are sent, how ranks are divided, micro-batches, recomputation.

Each is a piece of the trainer's command line, so that the trainer's checks refuse what is impossible, and say why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.settings.checks import divisors
from megatron_zpp.settings.resolved import ResolvedModel

# Flags that go together. {P}: data-parallel ranks of a node, {N}: nodes, {warmup}: steps in which bits warm up.
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
HPZ = "--zero-hpz-partition-size {P}"
LOCO = "--zeropp-loco"
MOVES = "--zeropp-weight-moves"
SIX_BIT_WEIGHTS = "--zeropp-weight-bits 6"
TWO_BITS = "--zeropp-gradient-bits 2"
WARMUP = "--zeropp-gradient-bits-warmup {warmup}:4"
ELEMENT_SCALES = "--zeropp-gradient-element-scales"
INT8_SUMS = "--zeropp-gradient-sum-dtype int8"  # no measurable loss: E6
ALL_FLAGS = f"{QUANTIZED} {HPZ} {LOCO}"
RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class WirePreset:
    """A way to send weights and gradients: flags, and what they do to the loss."""

    name: str
    flags: str
    # Percent over an fp32 wire and spread over three seeds, of the nearest recipe of docs/experiments.md, E5 and E12,
    # on a GPT of 1.3 million parameters. None: nothing is rounded below 16 bits.
    loss: tuple[float, float] | None = None

    @property
    def rank(self) -> int:
        """The place among all presets, which round more and more; 0 for what the user gave."""
        return WIRE_PRESETS.index(self) if self in WIRE_PRESETS else 0

    @property
    def risk(self) -> float:
        """The loss to expect at worst, in percent: mean plus spread."""
        return sum(self.loss) if self.loss is not None else 0.0


TWO_BIT_GRADIENTS = f"{ALL_FLAGS} {MOVES} {TWO_BITS} {WARMUP} {ELEMENT_SCALES}"
WIRE_PRESETS = (  # from what rounds nothing to what rounds most
    WirePreset("ZeRO-3", ""),
    WirePreset("HSDP", "--num-distributed-optimizer-instances {N}"),
    WirePreset("hpZ", HPZ),
    WirePreset("all flags", ALL_FLAGS, (0.15, 0.19)),
    WirePreset("all flags, moves", f"{ALL_FLAGS} {MOVES}", (0.15, 0.19)),
    WirePreset("all flags, moves, int8 sums", f"{ALL_FLAGS} {MOVES} {INT8_SUMS}", (0.15, 0.19)),
    WirePreset("all flags, moves, 2-bit gradients", TWO_BIT_GRADIENTS, (-0.23, 0.13)),
    WirePreset("all flags, 6-bit moves, 2-bit gradients", f"{TWO_BIT_GRADIENTS} {SIX_BIT_WEIGHTS}", (-0.16, 0.18)),
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


# A flag with one of these prefixes settles a question: then only the user's answer is tried.
SETTLES = {
    "wire": ("--zero-", "--zeropp", "--hpz", "--num-distributed-optimizer-instances", "--cpu-offload"),
    "layout": ("--tensor-model", "--pipeline-model", "--context-parallel", "--expert-model"),
    "recompute": ("--recompute", "--checkpoint-activations", "--deepspeed-activation-checkpointing"),
    "micro-batch": ("--micro-batch-size",),
}


def is_settled(question: str, flags: Sequence[str]) -> bool:
    return any(flag.startswith(SETTLES[question]) for flag in flags)


def wire_presets(
    cluster: Cluster, layout: Layout, flags: Sequence[str], steps: int
) -> Iterator[tuple[WirePreset, str]]:
    """Yield the presets that make sense for the layout on the cluster, and their flags."""
    if is_settled("wire", flags):
        yield WirePreset("as given", ""), ""
        return
    nodes = max(1, cluster.nodes // layout.pipeline)  # of a pipeline stage
    ranks = cluster.gpus_per_node // layout.tensor  # that share parameters in a node
    places = {"P": ranks, "N": nodes, "warmup": max(1, steps // 10)}
    for preset in WIRE_PRESETS:
        has_levels = nodes > 1 and (ranks > 1 or "{P}" not in preset.flags)
        if has_levels or not preset.flags:
            yield preset, preset.flags.format(**places)


def layouts(cluster: Cluster, model: ResolvedModel, seq_length: int, flags: Sequence[str]) -> Iterator[Layout]:
    """Yield layouts that keep a layer's collectives within a node, and give a pipeline stage whole nodes.

    Only long sequences are divided. Experts are divided within or over whole nodes, if a tensor or pipeline size is 1.
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
            yield Layout(tensor, context, pipeline)
            if model.num_experts and context == 1 and 1 in (tensor, pipeline):
                per_node = cluster.gpus_per_node // tensor  # ranks with the same part of layers
                for experts in divisors(model.num_experts // tensor)[1:]:
                    lies_evenly = per_node % experts == 0 or experts % per_node == 0
                    if lies_evenly and per_node * cluster.nodes // pipeline % experts == 0:
                        yield Layout(tensor, context, pipeline, experts)
