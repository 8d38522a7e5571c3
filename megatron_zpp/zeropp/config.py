"""What a user of ZeRO++ and LoCo chooses."""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED_BITS = (2, 3, 4, 6, 8)
ROUNDINGS = ("nearest", "stochastic")


_BITS = ("weight_bits", "weight_intra_bits", "weight_difference_bits", "gradient_bits", "gradient_intra_bits")


@dataclass(frozen=True)
class LoCoConfig:
    """LoCo (arXiv 2407.04480): low-bit gradients with a moving average of past compression errors.

    beta: weight of the OLD error in ``e <- beta * e + (1 - beta) * d``; 0 is classic error feedback.
    reset_interval: T, the optimizer steps that the error lives for; None = for ever.
    reset: "hard" starts again from zero every T steps, as published, and throws away up to e / (1 - beta); "decay"
        forgets 1 / T of the error at every step instead.
    hops: "inter" corrects the hop between nodes, with M / P elements of state a rank (M parameters, P ranks per node);
        "both" also that within a node, with M more.
    error_dtype: how the error is kept: "int8" blocks, "bf16" or "fp32".
    """

    beta: float = 0.8
    reset_interval: int | None = 1024
    reset: str = "hard"
    hops: str = "inter"
    error_dtype: str = "int8"

    def __post_init__(self) -> None:
        _check_choice("LoCo's reset", self.reset, ("hard", "decay"))
        _check_choice("LoCo's hops", self.hops, ("inter", "both"))
        _check_choice("LoCo's error_dtype", self.error_dtype, ("int8", "bf16", "fp32"))
        if not 0.0 <= self.beta < 1.0:
            raise ValueError(f"LoCo's beta must be in [0, 1), got {self.beta}")
        if self.reset_interval is not None and self.reset_interval < 1:
            raise ValueError(f"LoCo's reset interval must be at least one step, got {self.reset_interval}")


@dataclass(frozen=True)
class ZeroPPConfig:
    """ZeRO++ (arXiv 2306.10209) and LoCo for one model. Everything is off by default.

    quantized_weights: qwZ. Parameters are all-gathered as ``weight_bits`` integers.
    hpz_partition_size: hpZ. The number of ranks, normally those of a node, that hold one secondary copy of the
        parameters, so that only the first gather after an optimizer step crosses nodes. 1 = off.
    quantized_gradients: qgZ. Gradients are reduced by an all-to-all within each node in ``gradient_intra_bits`` and,
        once per optimizer step, one between nodes in ``gradient_bits``.
    loco: error feedback on quantized gradients; needs ``quantized_gradients``.
    ranks_per_node: which consecutive ranks share a node. Default: ``hpz_partition_size`` if that is set, else found
        from where the ranks run.
    *_bits: 2, 3, 4, 6 or 8, or None for unquantized.
    *_block_size: elements that share a scale, a multiple of 8; None = one scale per parameter and rank.
    *_rounding: "nearest" (half to even), or "stochastic" from a counter-based generator seeded by ``seed``.
    hpz_secondary_dtype: "16bit" keeps the secondary partition as the values that are gathered; "int8" keeps the
        quantized blocks as they arrived between nodes, which halves its memory and quantizes the gathers within the
        node at no further loss; needs ``quantized_weights``.
    weight_difference_bits: send between nodes only what changed since the secondary partition, in so many bits
        (after SDP4Bit, arXiv 2410.15526); what was lost stays in the next difference. Needs hpZ.
    hadamard: rotate gradients by 32 x 32 Hadamard matrices before they are quantized, which spreads outliers.
    """

    quantized_weights: bool = False
    hpz_partition_size: int = 1
    quantized_gradients: bool = False
    loco: LoCoConfig | None = None
    ranks_per_node: int | None = None
    weight_bits: int | None = 8
    weight_intra_bits: int | None = None
    weight_block_size: int | None = 256
    gradient_bits: int | None = 4
    gradient_intra_bits: int | None = 8
    gradient_block_size: int | None = 128
    weight_rounding: str = "nearest"
    gradient_rounding: str = "nearest"
    hpz_secondary_dtype: str = "16bit"
    weight_difference_bits: int | None = None
    weight_difference_block_size: int | None = 2048
    hadamard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("weight_rounding", self.weight_rounding, ROUNDINGS)
        _check_choice("gradient_rounding", self.gradient_rounding, ROUNDINGS)
        _check_choice("hpz_secondary_dtype", self.hpz_secondary_dtype, ("16bit", "int8"))
        for name in _BITS:
            bits = getattr(self, name)
            if bits is not None and bits not in SUPPORTED_BITS:
                raise ValueError(f"{name} must be one of {SUPPORTED_BITS}, or None for unquantized; got {bits}")
        for name in ("weight_block_size", "gradient_block_size", "weight_difference_block_size"):
            size = getattr(self, name)
            if size is not None and (size < 8 or size % 8):
                raise ValueError(f"{name} must be a positive multiple of 8, or None for per tensor; got {size}")
        if self.hpz_partition_size < 1:
            raise ValueError(f"hpz_partition_size must be at least 1 (1 = off), got {self.hpz_partition_size}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
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
            ):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} is about the secondary partition: set hpz_partition_size")
        if self.hpz_secondary_dtype == "int8":
            if not self.quantized_weights or self.weight_bits is None:
                raise ValueError("hpz_secondary_dtype int8 keeps quantized blocks: set quantized_weights")
            if self.weight_intra_bits is not None or self.weight_difference_bits is not None:
                raise ValueError(
                    "hpz_secondary_dtype int8 passes the blocks on as they are: leave weight_intra_bits and "
                    "weight_difference_bits out"
                )
        if self.hadamard and not self.quantized_gradients:
            raise ValueError("hadamard rotates quantized gradients: set quantized_gradients too")
        if self.hadamard and (self.gradient_block_size or 32) % 32:
            raise ValueError(f"hadamard needs gradient blocks of a multiple of 32, got {self.gradient_block_size}")

    @property
    def enabled(self) -> bool:
        """Whether anything differs from plain ZeRO-3."""
        return self.quantized_weights or self.quantized_gradients or self.hpz_partition_size > 1


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
