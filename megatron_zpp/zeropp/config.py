"""What a user of ZeRO++ and LoCo chooses."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zpp.bounds import Bounds

from .wire.quantization import SCALINGS, Code


@dataclass(frozen=True)
class BitsWarmup:
    """``bits`` during the first ``steps`` optimizer steps of a run."""

    steps: int
    bits: int

    @classmethod
    def parse(cls, text: str) -> BitsWarmup:
        """Read "STEPS:BITS". Raises ValueError for anything else."""
        match = re.fullmatch(r"([1-9]\d*):(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"must be STEPS:BITS, such as 500:4, got {text!r}")
        return cls(int(match[1]), int(match[2]))


SUPPORTED_BITS = (1, 2, 3, 4, 6, 8)
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDINGS = ("nearest", "stochastic")
_ANY_BITS = f"{', '.join(map(str, SUPPORTED_BITS[:-1]))} or {SUPPORTED_BITS[-1]}"


def config_flag(
    name: str,
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    needs: str | None = None,
    zero_is_none: bool = False,
    repr: bool = True,
    **bounds: float,
) -> Any:
    """A field that is also the trainer's flag ``name``, which reads all of this from the field's metadata.

    A field without metadata is no flag. needs: the field without which this flag is an error. zero_is_none: the flag
    says 0 for None. repr: False where the field says nothing about what checkpoints keep, which know a config by its
    repr. bounds: of ``Bounds``, for a number.
    """
    metadata = dict(
        name=name,
        help=help,
        choices=choices,
        metavar=metavar,
        needs=needs,
        zero_is_none=zero_is_none,
        bounds=Bounds(**bounds),
    )
    return dataclasses.field(default=default, repr=repr, metadata=metadata)


@dataclass(frozen=True)
class LoCoConfig:
    """LoCo (arXiv 2407.04480): low-bit gradients with a moving average of past compression errors.

    What a field means is its help. Raises ValueError for values that cannot be.
    """

    # In e <- beta * e + (1 - beta) * d.
    beta: float = config_flag(
        "--zeropp-loco-beta", 0.8, "LoCo's weight of the old error; 0 = classic error feedback", at_least=0, below=1
    )
    # The paper's T. None = never.
    reset_interval: int | None = config_flag(
        "--zeropp-loco-reset-interval",
        1024,
        "optimizer steps after which LoCo's error is reset; 0 = never",
        zero_is_none=True,
        at_least=1,
    )
    # "hard", as published, throws away up to e / (1 - beta); "decay" forgets 1 / reset_interval of e at every step.
    reset: str = config_flag(
        "--zeropp-loco-reset",
        "hard",
        "how LoCo's error is reset: all at once, or by a little each step",
        choices=("hard", "decay"),
    )
    # "inter" has M / P elements of state a rank (M parameters, P ranks per node), "both" M more.
    hops: str = config_flag(
        "--zeropp-loco-hops",
        "inter",
        "hops that LoCo corrects: between nodes, or within them too",
        choices=("inter", "both"),
    )
    error_dtype: str = config_flag(
        "--zeropp-loco-error-dtype", "int8", "how LoCo keeps its error", choices=("int8", "bf16", "fp32")
    )
    # Keep the error from before each step, too, so that ``undo_step`` takes it back to that. Without this second copy
    # an undone step leaves no error at all. The trainer sets it where steps with finite gradients are undone.
    exact_undo: bool = dataclasses.field(default=True, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, "LoCo's ")


@dataclass(frozen=True)
class ZeroPPConfig:
    """ZeRO++ and LoCo. Everything is off by default.

    ZeRO++ is arXiv 2306.10209. What a field means is its help, where None is the flag's 0: unquantized, or one scale
    per parameter and rank. Bits are of ``SUPPORTED_BITS``, block sizes multiples of 8.

    Raises ValueError for values that cannot be, or do not fit together.
    """

    quantized_weights: bool = config_flag(
        "--zero-quantized-weights", False, "qwZ: all-gather parameters as block-quantized integers"
    )
    # Only the first gather after an optimizer step crosses nodes.
    hpz_partition_size: int = config_flag(
        "--zero-hpz-partition-size",
        1,
        "hpZ: ranks that hold one secondary copy of the parameters, normally the GPUs of a node; 1 = off",
        at_least=1,
    )
    # Within each node at every micro-batch, between nodes once per optimizer step.
    quantized_gradients: bool = config_flag(
        "--zero-quantized-gradients", False, "qgZ: reduce gradients by a two-hop quantized all-to-all"
    )
    loco: LoCoConfig | None = config_flag(
        "--zeropp-loco",
        None,
        "LoCo: feed a moving average of compression errors back into the gradients",
        needs="quantized_gradients",
    )
    ranks_per_node: int | None = config_flag(
        "--zero-ranks-per-node",
        None,
        "ranks that share a node; default from where the ranks run, or --zero-hpz-partition-size",
        at_least=1,
    )
    weight_bits: int | None = config_flag(
        "--zero-weight-bits",
        8,
        f"bits of quantized weights between nodes: {_ANY_BITS}",
        needs="quantized_weights",
    )
    # Here and below as quantization.py defines: "absmax" has levels up to the block's largest value; "mean" has steps
    # that are a multiple of the block's mean |x|, for 1 to 4 bits, and cuts large values off. LoCo returns what that
    # costs gradients; a copy of weights would lag behind.
    weight_scaling: str = config_flag(
        "--zero-weight-scaling",
        "absmax",
        "what sets the scale of quantized weights between nodes",
        choices=SCALINGS,
        needs="quantized_weights",
        repr=False,
    )
    weight_intra_bits: int | None = config_flag(
        "--zero-weight-intra-bits",
        None,
        "bits of weights within a node; default unquantized",
        needs="quantized_weights",
        zero_is_none=True,
    )
    weight_intra_scaling: str = config_flag(
        "--zero-weight-intra-scaling",
        "absmax",
        "what sets the scale of weights within a node",
        choices=SCALINGS,
        needs="weight_intra_bits",
        repr=False,
    )
    weight_block_size: int | None = config_flag(
        "--zero-weight-block-size",
        256,
        "elements per weight scale; 0 = one scale per tensor",
        needs="quantized_weights",
        zero_is_none=True,
    )
    gradient_bits: int | None = config_flag(
        "--zero-gradient-bits",
        4,
        f"bits of quantized gradients between nodes: {_ANY_BITS}; 0 = unquantized",
        needs="quantized_gradients",
        zero_is_none=True,
    )
    gradient_scaling: str | None = config_flag(
        "--zero-gradient-scaling",
        None,
        "what sets the scale of gradients between nodes; default mean below 4 bits, absmax from 4 on",
        choices=SCALINGS,
        needs="quantized_gradients",
        repr=False,
    )
    # In the default code of so many bits, whatever the scaling is later. Not in repr: LoCo's error is kept alike.
    gradient_bits_warmup: str | None = config_flag(
        "--zero-gradient-bits-warmup",
        None,
        "bits of gradients between nodes during the first optimizer steps, such as 500:4; steps that are skipped do "
        "not count",
        metavar="STEPS:BITS",
        needs="quantized_gradients",
        repr=False,
    )
    gradient_intra_bits: int | None = config_flag(
        "--zero-gradient-intra-bits",
        8,
        "bits of quantized gradients within a node; 0 = unquantized",
        needs="quantized_gradients",
        zero_is_none=True,
    )
    gradient_intra_scaling: str | None = config_flag(
        "--zero-gradient-intra-scaling",
        None,
        "what sets the scale of gradients within a node; default mean below 4 bits, absmax from 4 on",
        choices=SCALINGS,
        needs="quantized_gradients",
        repr=False,
    )
    gradient_block_size: int | None = config_flag(
        "--zero-gradient-block-size",
        128,
        "elements per gradient scale; 0 = one scale per tensor",
        needs="quantized_gradients",
        zero_is_none=True,
    )
    # "nearest" rounds half to even; "stochastic" draws from a counter-based generator.
    weight_rounding: str = config_flag(
        "--zero-weight-rounding",
        "nearest",
        "rounding of quantized weights",
        choices=ROUNDINGS,
        needs="quantized_weights",
    )
    gradient_rounding: str = config_flag(
        "--zero-gradient-rounding",
        "nearest",
        "rounding of quantized gradients",
        choices=ROUNDINGS,
        needs="quantized_gradients",
    )
    # Of the sum within a node between a step's micro-batches. All but fp32 are rounded stochastically.
    gradient_sum_dtype: str = config_flag(
        "--zero-gradient-sum-dtype",
        "fp32",
        "how a node's sums of gradients are kept from micro-batch to micro-batch; int8 in blocks, as gradients travel",
        choices=("fp32", "bf16", "int8"),
        needs="quantized_gradients",
        repr=False,
    )
    offload_gradient_sums: bool = config_flag(
        "--zero-offload-gradient-sums",
        False,
        "keep the node's sums of gradients in host memory from micro-batch to micro-batch",
        needs="quantized_gradients",
        repr=False,
    )
    # "int8" takes half the memory and quantizes the gathers within the node at no further loss. Needs qwZ.
    hpz_secondary_dtype: str = config_flag(
        "--hpz-secondary-dtype",
        "16bit",
        "how hpZ keeps its copy: as the values, or as int8 blocks",
        choices=("16bit", "int8"),
    )
    # After SDP4Bit, arXiv 2410.15526; what was lost stays in the next difference. Needs hpZ.
    weight_difference_bits: int | None = config_flag(
        "--zero-weight-difference-bits",
        None,
        "send between nodes only what changed since hpZ's copy, in so many bits, such as 4",
        zero_is_none=True,
    )
    weight_difference_scaling: str = config_flag(
        "--zero-weight-difference-scaling",
        "absmax",
        "what sets the scale of weight differences",
        choices=SCALINGS,
        needs="weight_difference_bits",
        repr=False,
    )
    weight_difference_bits_warmup: str | None = config_flag(
        "--zero-weight-difference-bits-warmup",
        None,
        "bits of the weight differences that the first optimizer steps make, such as 500:4",
        metavar="STEPS:BITS",
        needs="weight_difference_bits",
        repr=False,
    )
    weight_difference_block_size: int | None = config_flag(
        "--zero-weight-difference-block-size",
        2048,
        "elements per scale of weight differences",
        needs="weight_difference_bits",
        zero_is_none=True,
    )
    hadamard: bool = config_flag(
        "--zero-hadamard",
        False,
        "rotate gradients by 32 x 32 Hadamard matrices before they are quantized",
        needs="quantized_gradients",
    )
    # Not in repr, by which saved state is told apart: it changes nothing that is kept.
    check_agreement: bool = config_flag(
        "--zero-check-agreement",
        False,
        "for debugging: before each gather compare on all ranks whether parameters changed, and name those that differ",
        repr=False,
    )
    # Of all that is quantized but LoCo's errors.
    scale_dtype: str = config_flag(
        "--zero-scale-dtype",
        "fp32",
        "how scales travel; bf16 halves them",
        choices=tuple(SCALE_DTYPES),
        repr=False,
    )
    # Learned from what travels, at both ends alike. Not in repr, by which saved state is told apart: description.py.
    gradient_element_scales: bool = config_flag(
        "--zero-gradient-element-scales",
        False,
        "give each element of gradients between nodes a scale of its own, which ranks learn from the codes that travel",
        needs="quantized_gradients",
        repr=False,
    )
    seed: int = 0  # of stochastic rounding; the trainer sets it to --seed

    def __post_init__(self) -> None:
        check_fields(self, "")
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("_bits") and value not in (None, *SUPPORTED_BITS):
                raise ValueError(f"{name} must be one of {SUPPORTED_BITS}, or None for unquantized; got {value}")
            if name.endswith("_block_size") and value is not None and (value < 8 or value % 8):
                raise ValueError(f"{name} must be a positive multiple of 8, or None for per tensor; got {value}")
        for name in ("weight", "weight_intra", "weight_difference", "gradient", "gradient_intra"):
            bits, scaling = getattr(self, f"{name}_bits"), getattr(self, f"{name}_scaling")
            if bits is None and scaling != getattr(type(self), f"{name}_scaling"):
                raise ValueError(f"{name}_scaling {scaling} is about quantized values: set {name}_bits")
            if bits is not None:
                try:
                    Code(bits, scaling)
                except ValueError as error:
                    raise ValueError(f"{name}_bits {bits} and {name}_scaling {scaling}: {error}") from None
        for name in ("gradient", "weight_difference"):
            self._check_bits_warmup(name)
        if self.ranks_per_node is not None and self.hpz_partition_size not in (1, self.ranks_per_node):
            raise ValueError(
                f"hpz_partition_size {self.hpz_partition_size} and ranks_per_node {self.ranks_per_node} differ: "
                "the secondary partition lives within a node, so set them equal or leave ranks_per_node out"
            )
        if self.quantized_weights and self.weight_bits is None:
            raise ValueError("quantized_weights with weight_bits None quantizes nothing: set the bits or leave it out")
        if self.loco is not None and self.loco.hops == "both" and self.gradient_intra_bits is None:
            raise ValueError('LoCo\'s hops "both" corrects the hop within a node, which is unquantized: set its bits')
        if self.loco is not None and not self.quantized_gradients:
            raise ValueError("LoCo corrects quantized gradients: set quantized_gradients too")
        if self.loco is not None and self.gradient_bits is None:
            raise ValueError("LoCo corrects the hop between nodes, which gradient_bits=None leaves unquantized")
        if self.hpz_partition_size == 1:
            for name, off in (
                ("weight_intra_bits", None),
                ("weight_difference_bits", None),
                ("hpz_secondary_dtype", "16bit"),
                ("check_agreement", False),
            ):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} is about the secondary partition: set hpz_partition_size")
        if self.hpz_secondary_dtype == "int8":
            if not self.quantized_weights or self.weight_bits is None:
                raise ValueError("hpz_secondary_dtype int8 keeps quantized blocks: set quantized_weights")
            if self.weight_intra_bits is not None:
                raise ValueError(
                    "hpz_secondary_dtype int8 passes the blocks on as they are: leave weight_intra_bits out"
                )
        if self.gradient_element_scales and not self.quantized_gradients:
            raise ValueError("gradient_element_scales is about quantized gradients: set quantized_gradients too")
        learns = self.gradient_bits not in (None, 1) or self.gradient_bits_warmup is not None
        if self.gradient_element_scales and not learns:
            raise ValueError(
                "gradient_element_scales learns from how large the codes between nodes are, which gradient_bits "
                f"{self.gradient_bits} does not say: set 2 to 8 bits, or more bits at first (gradient_bits_warmup)"
            )
        if self.hadamard and not self.quantized_gradients:
            raise ValueError("hadamard rotates quantized gradients: set quantized_gradients too")
        if (self.gradient_sum_dtype != "fp32" or self.offload_gradient_sums) and not self.quantized_gradients:
            raise ValueError(
                "gradient_sum_dtype and offload_gradient_sums are about sums of quantized gradients: set "
                "quantized_gradients too"
            )
        if self.hadamard and (self.gradient_block_size or 32) % 32:
            raise ValueError(f"hadamard needs gradient blocks of a multiple of 32, got {self.gradient_block_size}")

    def sums_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients in ``dtype`` that stay unquantized travel in between nodes, where they are a node's sums.

        In fp32 where the others are quantized: few are left, so that it costs nothing to keep all digits.
        """
        return dtype if self.gradient_bits is None else torch.float32

    def _check_bits_warmup(self, name: str) -> None:
        text, bits = getattr(self, f"{name}_bits_warmup"), getattr(self, f"{name}_bits")
        if text is None:
            return
        try:
            warmup = BitsWarmup.parse(text)
        except ValueError as error:
            raise ValueError(f"{name}_bits_warmup {error}") from None
        if bits is None or (name == "gradient" and not self.quantized_gradients):
            raise ValueError(f"{name}_bits_warmup {text} is about quantized values: set {name}_bits")
        if warmup.bits not in SUPPORTED_BITS or warmup.bits <= bits:
            raise ValueError(
                f"{name}_bits_warmup {text} must have bits of {SUPPORTED_BITS}, and more than {name}_bits {bits}"
            )

    def gradient_code(self, step: float) -> tuple[int | None, str | None]:
        """Bits and scaling of gradients between nodes in the optimizer step that ``step`` others came before."""
        return self._code_of("gradient", step)

    def weight_difference_code(self, step: float) -> tuple[int | None, str | None]:
        """Bits and scaling of the weight differences that this optimizer step makes."""
        return self._code_of("weight_difference", step)

    def _code_of(self, name: str, step: float) -> tuple[int | None, str | None]:
        text = getattr(self, f"{name}_bits_warmup")
        warmup = BitsWarmup.parse(text) if text is not None else None
        if warmup is not None and step < warmup.steps:
            return warmup.bits, getattr(type(self), f"{name}_scaling")
        return getattr(self, f"{name}_bits"), getattr(self, f"{name}_scaling")

    @property
    def has_bits_warmup(self) -> bool:
        """Whether what travels depends on the number of optimizer steps so far."""
        return self.gradient_bits_warmup is not None or self.weight_difference_bits_warmup is not None

    @property
    def enabled(self) -> bool:
        """Whether anything differs from plain ZeRO-3."""
        return self.quantized_weights or self.quantized_gradients or self.hpz_partition_size > 1

    @property
    def stated_ranks_per_node(self) -> int | None:
        """What the settings say of a node's ranks: that of the secondary partition, where nothing else does."""
        if self.ranks_per_node is None and self.hpz_partition_size > 1:
            return self.hpz_partition_size
        return self.ranks_per_node


def check_fields(config: Any, owner: str) -> None:
    """Raise ValueError for a value outside of its field's choices or bounds."""
    for field in dataclasses.fields(config):
        choices, value = field.metadata.get("choices"), getattr(config, field.name)
        if choices is not None and value not in (*choices, field.default):
            raise ValueError(f"{owner}{field.name} must be one of {', '.join(choices)}, got {value!r}")
        if field.metadata and isinstance(value, int | float):
            try:
                field.metadata["bounds"].check(value)
            except ValueError as error:
                raise ValueError(f"{owner}{field.name} {error}, got {value}") from None


def check_finds_unused(config: ZeroPPConfig) -> None:
    """Raise ValueError where ``find_unused_parameters`` would have no effect."""
    if not config.quantized_gradients:
        raise ValueError("find_unused_parameters is about quantized_gradients; FSDP2's own leave unused parameters out")
