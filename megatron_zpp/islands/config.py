"""Settings of islands."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_zpp.fields import check_fields, flag
from megatron_zpp.zeropp.config import SUPPORTED_BITS, LoCoConfig
from megatron_zpp.zeropp.wire.quantization import SCALINGS, Code

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class IslandConfig:
    """Islands. Groups of ranks train by themselves, and synchronize every H steps (DiLoCo, arXiv 2311.08105)."""

    FLAGS: ClassVar[dict[str, str]] = dict(prefix="--island-", resume="noted", tier="experimental")
    sync_interval: int = flag(100, "optimizer steps between two synchronizations (DiLoCo's H)", at_least=1)
    outer_optimizer: str = flag(
        "nesterov", "SGD with Nesterov's momentum, or with plain momentum", choices=("nesterov", "sgd"), name=None
    )
    outer_lr: float = flag(0.7, "learning rate of the outer optimizer; 1 without momentum: take the mean", above=0)
    outer_momentum: float = flag(0.9, "momentum of the outer optimizer", at_least=0, below=1)
    # None: in ``dtype``.
    bits: int | None = flag(None, "bits of what islands send to each other, 1 to 8; 0 = unquantized", zero_is_none=True)
    block_size: int = flag(128, "elements that share a scale", at_least=8, at_most=2**20, name=None)
    scaling: str | None = flag(
        None, "code between islands; default by bits: mean below 4, else absmax", choices=SCALINGS, name=None
    )
    dtype: str = flag("fp32", "dtype of what islands send unquantized", choices=tuple(DTYPES), name=None)
    loco: bool = flag(False, "LoCo between islands: add what quantization lost to the next synchronization")
    loco_beta: float = flag(
        LoCoConfig.beta,
        "LoCo's weight of the old error between islands; 0 = classic error feedback",
        needs="loco",
        at_least=0,
        below=1,
        name=None,
    )

    fragments: int = flag(
        1,
        "parts of the model, every k-th layer, that are sent one after the other within an interval (Streaming DiLoCo)",
        at_least=1,
    )
    sync_delay: int = flag(0, "steps of training while a fragment is in flight (Streaming DiLoCo's tau)", at_least=0)
    merge_alpha: float = flag(
        0.0,
        "share of its own parameters that an island keeps in a synchronization; 0.5 as published with a delay",
        at_least=0,
        below=1,
    )

    offload: bool = flag(False, "keep the outer parameters and the outer momentum in host memory", name=None)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.bits not in (None, *SUPPORTED_BITS):
            raise ValueError(f"bits must be one of {SUPPORTED_BITS}, or None for unquantized; got {self.bits}")
        if self.block_size % 8:
            raise ValueError(f"block_size must be a multiple of 8, got {self.block_size}")
        if self.bits is None and self.scaling is not None:
            raise ValueError(f"scaling {self.scaling} requires quantized values: set bits")
        if self.bits is not None:
            Code(self.bits, self.scaling)
        if self.loco and self.bits is None and self.dtype == "fp32":
            raise ValueError("loco returns what was lost, and fp32 loses nothing: set bits, or leave it out")
        if self.fragments > self.sync_interval:
            raise ValueError(f"fragments {self.fragments} must be at most sync_interval {self.sync_interval}")
        if self.sync_delay >= self.sync_interval:
            raise ValueError(f"sync_delay {self.sync_delay} must be below sync_interval {self.sync_interval}")

    @property
    def feedback(self) -> LoCoConfig | None:
        """Settings of the errors, which are never reset, because no synchronization is undone."""
        if not self.loco:
            return None
        # Errors in 8 bits have blocks, and a wire without codes has none.
        error_dtype = "bf16" if self.bits is None else "int8"
        return LoCoConfig(beta=self.loco_beta, error_dtype=error_dtype, reset_interval=None, exact_undo=False)

    def describe(self) -> str:
        code = None if self.bits is None else Code(self.bits, self.scaling)
        sent = self.dtype if code is None else f"int{code.bits}{' (mean)' if code.is_mean else ''}"
        sent += f" with LoCo (beta {self.loco_beta})" if self.loco else ""
        sent += f", {self.fragments} fragments in turn" if self.fragments > 1 else ""
        sent += f", {self.sync_delay} steps in flight" if self.sync_delay else ""
        offload = ", outer parameters in host memory" if self.offload else ""
        momentum = f"{'Nesterov ' if self.outer_optimizer == 'nesterov' else ''}momentum {self.outer_momentum}"
        return (
            f"synchronize every {self.sync_interval} steps, {sent} between them; outer SGD with learning rate "
            f"{self.outer_lr} and {momentum}{offload}"
        )
