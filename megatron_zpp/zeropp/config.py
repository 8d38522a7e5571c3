"""Settings of ZeRO++ and LoCo."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron_zpp.fields import check_fields, flag

from .wire.nf4 import SKIP
from .wire.quantization import SCALINGS, Code

SUPPORTED_BITS = (1, 2, 3, 4, 6, 8)
MOVED_BITS = (4, 6, 8)  # widths of codes that can be sent as moves
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDINGS = ("nearest", "stochastic")
OFFLOADED = {"copies": "hpz_partition_size", "errors": "loco", "sums": "quantized_gradients"}  # and what makes them
QUANTIZED = "zero_quantized_weights zero_quantized_gradients zeropp_secondary_dtype=int8 zeropp_frozen_dtype"
_main_flag = functools.partial(flag, tier="stable", first="Memory and links")
_qwz_flag = functools.partial(flag, needs="quantized_weights")
_qgz_flag = functools.partial(flag, needs="quantized_gradients")


@dataclass(frozen=True)
class LoCoConfig:
    """LoCo (arXiv 2407.04480): low-bit gradients with a moving average of past compression errors.

    Each field's help says what it means. Raises ValueError for invalid values.
    """

    # In e <- beta * e + (1 - beta) * d.
    beta: float = flag(
        0.8,
        "LoCo's weight of the old error; 0 = classic error feedback",
        at_least=0,
        below=1,
        tier="stable",
        deepspeed="zero_optimization.zeropp_loco_param.err_beta",
    )
    # The paper's T. None = never.
    reset_interval: int | None = flag(
        1024,
        "optimizer steps after which LoCo's error is reset; 0 = never",
        zero_is_none=True,
        at_least=1,
        tier="stable",
        deepspeed="zero_optimization.zeropp_loco_param.reset_T",
    )
    # "hard", as published, throws away up to e / (1 - beta); "decay" forgets 1 / reset_interval of e at every step.
    reset: str = flag("hard", "how LoCo's error is reset: at once, or gradually", choices=("hard", "decay"))
    # "inter" has M / P elements of state a rank (M parameters, P ranks per node), "both" M more.
    hops: str = flag("inter", "hops that LoCo corrects: between nodes, or both", choices=("inter", "both"))
    error_dtype: str = flag("int8", "how LoCo keeps its error", choices=("int8", "bf16", "fp32"))
    # Also keep the error from before each step, for ``undo_step`` to restore. Without this second copy an undone step
    # leaves no error at all. A trainer sets it where it undoes steps with finite gradients.
    exact_undo: bool = True
    FLAGS: ClassVar[dict[str, str]] = dict(prefix="--zeropp-loco-", resume="noted", settles="wire", tier="advanced")

    def __post_init__(self) -> None:
        check_fields(self, "LoCo's ")


@dataclass(frozen=True)
class ZeroPPConfig:
    """ZeRO++ and LoCo. Everything is off by default.

    ZeRO++ is arXiv 2306.10209. Each field's help says what it means; None is the flag's 0: unquantized, or one scale
    per parameter and rank. Raises ValueError for invalid values, and for settings that do not fit together.
    """

    FLAGS: ClassVar[dict[str, str]] = dict(prefix="--zeropp-", resume="noted", tier="advanced", settles="wire")
    quantized_weights: bool = _main_flag(
        False,
        "qwZ: all-gather parameters as block-quantized integers",
        name="--zero-quantized-weights",
        deepspeed="zero_optimization.zero_quantized_weights",
    )
    # Only the first gather after an optimizer step crosses nodes.
    hpz_partition_size: int = _main_flag(
        1,
        "hpZ: ranks that hold one secondary copy of the parameters, normally the GPUs of a node; 1 = off",
        at_least=1,
        name="--zero-hpz-partition-size",
        resume="free",
    )
    # Within each node at every micro-batch, between nodes once per optimizer step.
    quantized_gradients: bool = _main_flag(
        False,
        "qgZ: reduce gradients by a two-hop quantized all-to-all",
        name="--zero-quantized-gradients",
        deepspeed="zero_optimization.zero_quantized_gradients",
    )
    loco: LoCoConfig | None = flag(
        None,
        "LoCo: feed a moving average of compression errors back into the gradients",
        needs="quantized_gradients",
        tier="stable",
        first="Memory and links",
    )
    ranks_per_node: int | None = flag(
        None,
        "ranks that share a node; default --zero-hpz-partition-size if that is above 1, else the ranks of each host",
        at_least=1,
        resume="free",
    )
    weight_bits: int | None = _qwz_flag(8, "bits of weights between nodes: 2, 3, 4, 6 or 8")
    # Defined in quantization.py: "absmax" has levels up to the block's largest value; "mean" has steps that are a
    # multiple of the block's mean |x|, for 2 to 4 bits, and cuts off large values. LoCo makes up for that in gradients.
    weight_scaling: str = _qwz_flag(
        "absmax", "what sets the scale of weights between nodes", choices=SCALINGS, name=None
    )
    weight_intra_bits: int | None = _qwz_flag(
        None, "bits of weights within a node; default unquantized", zero_is_none=True, name=None
    )
    weight_intra_scaling: str = flag(
        "absmax", "what sets the scale of weights within a node", choices=SCALINGS, needs="weight_intra_bits", name=None
    )
    weight_block_size: int | None = _qwz_flag(
        256, "elements per weight scale; 0 = one scale per tensor", zero_is_none=True
    )
    gradient_bits: int | None = _qgz_flag(
        4,
        "bits of gradients between nodes: 2, 3, 4, 6 or 8; 1 = signs of each block's largest fifth; 0 = unquantized",
        zero_is_none=True,
    )
    gradient_scaling: str | None = _qgz_flag(
        None,
        "what sets the scale of gradients between nodes; default mean for 2 and 3 bits, absmax from 4 on",
        choices=SCALINGS,
    )
    # Uses the default code for its number of bits, whatever the scaling is later.
    gradient_bits_warmup: str | None = _qgz_flag(
        None,
        "bits of gradients between nodes during the first optimizer steps, such as 500:4, then --zeropp-gradient-bits; "
        "steps that are skipped do not count",
        metavar="STEPS:BITS",
        tier="experimental",
    )
    gradient_intra_bits: int | None = _qgz_flag(
        8, "bits of quantized gradients within a node; 0 = unquantized", zero_is_none=True
    )
    gradient_intra_scaling: str | None = _qgz_flag(
        None,
        "what sets the scale of gradients within a node; default mean for 2 and 3 bits, absmax from 4 on",
        choices=SCALINGS,
    )
    gradient_block_size: int | None = _qgz_flag(
        128, "elements per gradient scale; 0 = one scale per tensor", zero_is_none=True
    )
    # "nearest" rounds half to even; "stochastic" draws from a counter-based generator.
    weight_rounding: str = _qwz_flag("nearest", "rounding of quantized weights", choices=ROUNDINGS, name=None)
    gradient_rounding: str = _qgz_flag(
        "nearest", "rounding of quantized gradients", choices=ROUNDINGS, tier="experimental"
    )
    # All but fp32 are rounded stochastically.
    gradient_sum_dtype: str = _qgz_flag(
        "fp32",
        "how a node's sums of gradients are kept between micro-batches; int8 in blocks, as gradients are sent",
        choices=("fp32", "bf16", "int8"),
    )
    # "int8" takes half the memory and quantizes the gathers within the node at no further loss.
    hpz_secondary_dtype: str = flag(
        "16bit",
        "how hpZ keeps its copy: values, or int8 blocks",
        choices=("16bit", "int8"),
        name="--zeropp-secondary-dtype",
    )
    # Without quantized_weights the codes are the weights' own 16 bits: wire/moves.py.
    weight_moves: bool = flag(
        False,
        "send between nodes only which codes of weights moved since hpZ's copy, whose scales are kept; without "
        "--zero-quantized-weights the codes are the weights' own bits, and nothing is lost",
        tier="experimental",
    )
    # "card": a rank keeps the codes of all W shards. Moves go on within the node as they arrive; gathers send nothing.
    weight_copies: str = flag(
        "node", "what has a copy of all weights: a node, or each card", choices=("node", "card"), resume="free"
    )
    # Pinned on a GPU. Each gather reads the copies, each reduction the sums, and the last of a step LoCo's errors.
    offload: str = flag(
        "none",
        "keep in host memory: copies of weights, LoCo's errors, a node's sums of gradients, or all of them",
        choices=("none", *OFFLOADED, "all"),
        resume="free",
    )
    hadamard: bool = _qgz_flag(False, "rotate gradients by 32 x 32 Hadamard matrices before quantization", name=None)
    # For everything that is quantized but LoCo's errors.
    scale_dtype: str = flag(
        "fp32",
        "dtype of scales; bf16 halves them",
        choices=tuple(SCALE_DTYPES),
        effective_with=QUANTIZED,
        tier="experimental",
    )
    # Sender and receiver derive the same scales from what is sent.
    gradient_element_scales: bool = _qgz_flag(
        False,
        "scale each element of gradients between nodes by itself, as ranks learn from the codes that are sent",
        tier="experimental",
    )
    # "nf4": matrices that were never trainable and whose names have no word of nf4_skip are sent in NF4 (wire/nf4.py);
    # copies of all parameters are kept as they are sent. None: they are sent like trained ones.
    frozen_dtype: str | None = flag(None, "code of frozen matrices, with --lora-rank", choices=("nf4",))
    nf4_skip: tuple[str, ...] = SKIP
    seed: int = 0  # for stochastic rounding; the trainer sets it to --seed

    def __post_init__(self) -> None:
        check_fields(self, "")
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("_bits") and value not in (None, *SUPPORTED_BITS):
                raise ValueError(f"{name} must be one of {SUPPORTED_BITS}, or None for unquantized; got {value}")
            if name.endswith("_block_size") and value is not None and (value < 8 or value % 8):
                raise ValueError(f"{name} must be a positive multiple of 8, or None for per tensor; got {value}")
        bits = self.gradient_bits
        if self.warmup is not None and (self.warmup[1] not in SUPPORTED_BITS or self.warmup[1] <= (bits or 0)):
            raise ValueError(
                f"gradient_bits_warmup {self.gradient_bits_warmup} must have bits of {SUPPORTED_BITS}, and more than "
                f"gradient_bits {bits}"
            )
        for required, names in _REQUIREMENTS.items():
            for name in names:
                if getattr(self, name) != getattr(type(self), name) and not self._has(required):
                    raise ValueError(f"{name} requires {required}")
        makers = [maker for what, maker in OFFLOADED.items() if self.offloads(what)]
        if makers and not any(map(self._has, makers)):
            raise ValueError(f"offload {self.offload} requires {' or '.join(makers)}")
        for name in ("weight", "weight_intra", "gradient", "gradient_intra"):
            bits, scaling = getattr(self, f"{name}_bits"), getattr(self, f"{name}_scaling")
            if bits is not None:
                try:
                    Code(bits, scaling)
                except ValueError as error:
                    raise ValueError(f"{name}_bits {bits} and {name}_scaling {scaling}: {error}") from None
        if self.ranks_per_node is not None and self.hpz_partition_size not in (1, self.ranks_per_node):
            raise ValueError(
                f"hpz_partition_size {self.hpz_partition_size} and ranks_per_node {self.ranks_per_node} differ: "
                "the secondary partition lives within a node, so set them equal or leave ranks_per_node out"
            )
        if self.loco is not None and self.loco.hops == "both" and self.gradient_intra_bits is None:
            raise ValueError('LoCo\'s hops "both" requires gradient_intra_bits')
        if self.hpz_secondary_dtype == "int8" and self.weight_intra_bits is not None:
            raise ValueError("hpz_secondary_dtype int8 sends the blocks on as they are: leave weight_intra_bits out")
        if self.weight_moves and self.quantized_weights and self.weight_bits not in MOVED_BITS:
            raise ValueError(f"weight_moves requires weight_bits of {MOVED_BITS}, got {self.weight_bits}")
        for name in ("weight_rounding", "weight_scaling", "weight_intra_bits"):
            if self.weight_moves and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"weight_moves rounds to the nearest code and sends the codes on as they are: leave {name} out"
                )
        if self.frozen_dtype is not None and (self.weight_rounding, self.weight_intra_bits) != ("nearest", None):
            raise ValueError(
                "frozen_dtype rounds once and sends the codes on: leave weight_rounding and weight_intra_bits out"
            )
        has_one_bit = 1 in (self.gradient_bits, self.gradient_intra_bits)
        if has_one_bit and (self.gradient_rounding != "nearest" or (self.gradient_block_size or 8192) > 4096):
            raise ValueError(
                "1 bit takes the largest values of blocks: it requires gradient_rounding nearest and a "
                f"gradient_block_size of at most 4096, got {self.gradient_rounding} and {self.gradient_block_size}"
            )
        if self.hadamard and (self.gradient_block_size or 32) % 32:
            raise ValueError(f"hadamard requires gradient blocks of a multiple of 32, got {self.gradient_block_size}")

    def _has(self, name: str) -> bool:
        return self.keeps_copies if name == "hpz_partition_size" else getattr(self, name) not in (None, False)

    def offloads(self, what: str) -> bool:
        """Return whether ``what`` of ``OFFLOADED`` is kept in host memory, if there is any."""
        return self.offload in (what, "all")

    @property
    def keeps_copies(self) -> bool:
        """Whether ranks keep copies of what other nodes sent."""
        return self.hpz_partition_size > 1 or self.weight_copies == "card"

    @functools.cached_property
    def warmup(self) -> tuple[int, int] | None:
        """The first optimizer steps in which gradients between nodes have other bits, and these bits."""
        text = self.gradient_bits_warmup
        if text is None:
            return None
        match = re.fullmatch(r"([1-9]\d*):(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"gradient_bits_warmup must be STEPS:BITS, such as 500:4, got {text!r}")
        return int(match[1]), int(match[2])

    def for_weights(self) -> ZeroPPConfig:
        """Return these settings for a model that is never trained: how its weights are sent, and nothing else."""
        of_gradients: dict[str, Any] = {
            field.name: field.default
            for field in dataclasses.fields(self)
            if "gradient" in field.name or field.name in ("loco", "hadamard")
        }
        offload = self.offload if self.keeps_copies and self.offloads("copies") else "none"
        return dataclasses.replace(self, **of_gradients, offload=offload)

    @property
    def enabled(self) -> bool:
        """Whether anything differs from plain ZeRO-3."""
        return self.quantized_weights or self.quantized_gradients or self.keeps_copies

    @property
    def stated_ranks_per_node(self) -> int | None:
        """The ranks per node that were set, or else the ranks of a secondary partition."""
        return self.ranks_per_node or (self.hpz_partition_size if self.hpz_partition_size > 1 else None)


# Fields that must be set with those, if these differ from their defaults.
_REQUIREMENTS = {
    "weight_bits": ("weight_scaling", "quantized_weights"),  # otherwise qwZ would quantize nothing
    "weight_intra_bits": ("weight_intra_scaling",),
    "quantized_gradients": (
        "loco",
        "hadamard",
        "gradient_element_scales",
        "gradient_sum_dtype",
        "gradient_bits_warmup",
    ),
    "gradient_bits": ("gradient_scaling", "loco", "gradient_element_scales"),
    "gradient_intra_bits": ("gradient_intra_scaling",),
    "hpz_partition_size": ("weight_intra_bits", "weight_moves", "frozen_dtype", "hpz_secondary_dtype"),
    "frozen_dtype": ("nf4_skip",),
    "quantized_weights": ("hpz_secondary_dtype",),
    "weight_moves": ("weight_copies",),
}
