"""ZeRO++ and LoCo under torchtitan's trainer: ``with_zeropp(llama3_8b(), ZeroPPConfig(...))`` is one more config."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.trainer import Trainer

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp


class ZeroPPTrainer(Trainer):
    """torchtitan's trainer with ZeRO++ under its model, and ZeRO++'s state in its checkpoints as ``zeropp``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        zeropp: ZeroPPConfig = field(default_factory=ZeroPPConfig)

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)  # super() knows nothing of the class that slots=True makes
            if not self.training.disable_cuda_graphs:
                raise ValueError(
                    "a CUDA graph would replay for ever what ZeRO++ decided to send when it was captured: set "
                    "--training.disable_cuda_graphs"
                )
            if isinstance(self.loss, ChunkedLossWrapper.Config):
                raise ValueError(
                    "ChunkedLossWrapper backpropagates through lm_head apart from the norm of the same FSDP2 unit, and "
                    "ZeRO++ reduces a unit as a whole: take the loss inside, config.loss = config.loss.loss_fn"
                )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # All stages that this rank has of a pipeline, after their weights were made.
        self.zeropp = apply_zeropp(nn.ModuleList(self.model_parts), config.zeropp)
        if config.checkpoint.enable:
            self.checkpointer.states["zeropp"] = self.zeropp
        self._micro_batches = 0

    def forward_backward_step(self, **batch: Any) -> Tensor:
        # torchtitan lets FSDP2 reduce at every micro-batch, and says nothing of the last.
        self._micro_batches += 1
        self.zeropp.set_is_last_micro_batch(self._micro_batches % self.gradient_accumulation_steps == 0)
        return super().forward_backward_step(**batch)


def with_zeropp(config: Trainer.Config, zeropp: ZeroPPConfig) -> ZeroPPTrainer.Config:
    """``config`` for ``ZeroPPTrainer``, without CUDA graphs."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["training"] = replace(config.training, disable_cuda_graphs=True)
    return ZeroPPTrainer.Config(**values, zeropp=zeropp)
