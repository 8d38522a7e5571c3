"""What a user of ZeRO++ and LoCo chooses."""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED_BITS = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class LoCoConfig:
    """LoCo (arXiv 2407.04480): low-bit gradients with a moving average of past compression errors.

    beta: weight of the OLD error in ``e <- beta * e + (1 - beta) * d``; 0 is classic error feedback.
    reset_interval: optimizer steps after which the error starts again from zero; None = never.
    """

    beta: float = 0.8
    reset_interval: int | None = 1024

    def __post_init__(self) -> None:
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
    loco: error feedback on the gradients' hop between nodes; needs ``quantized_gradients``.
    ranks_per_node: which consecutive ranks share a node. Default: ``hpz_partition_size`` if that is set, else found
        from where the ranks run.
    *_bits: 2, 3, 4, 6 or 8, or None for unquantized.
    *_block_size: elements that share a scale, a multiple of 8; None = one scale per parameter and rank.
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

    def __post_init__(self) -> None:
        for name in ("weight_bits", "weight_intra_bits", "gradient_bits", "gradient_intra_bits"):
            bits = getattr(self, name)
            if bits is not None and bits not in SUPPORTED_BITS:
                raise ValueError(f"{name} must be one of {SUPPORTED_BITS}, or None for unquantized; got {bits}")
        for name in ("weight_block_size", "gradient_block_size"):
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
        if self.loco is not None and not self.quantized_gradients:
            raise ValueError("LoCo corrects quantized gradients: set quantized_gradients too")
        if self.loco is not None and self.gradient_bits is None:
            raise ValueError("LoCo corrects the hop between nodes, which gradient_bits=None leaves unquantized")
        if self.weight_intra_bits is not None and self.hpz_partition_size == 1:
            raise ValueError("weight_intra_bits quantizes gathers of the secondary partition: set hpz_partition_size")

    @property
    def enabled(self) -> bool:
        """Whether anything differs from plain ZeRO-3."""
        return self.quantized_weights or self.quantized_gradients or self.hpz_partition_size > 1
