"""ZeRO++ and LoCo under torchtitan's trainer: ``with_zeropp(llama3_8b(), ZeroPPConfig(...))`` is one more config."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
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

    config: Config
    loss_fn: Any

    def __init__(self, config: Config) -> None:
        if not config.training.disable_cuda_graphs:
            raise ValueError(
                "a CUDA graph would replay for ever what ZeRO++ decided to send when it was captured: set "
                "--training.disable_cuda_graphs"
            )
        chunks_loss = isinstance(config.loss, ChunkedLossWrapper.Config)
        if chunks_loss and config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "ChunkedLossWrapper reduces lm_head's FSDP2 unit twice in each micro-batch, and in a pipeline ZeRO++ "
                "cannot tell when: take the loss inside, config.loss = config.loss.loss_fn"
            )
        super().__init__(config)
        # All stages that this rank has of a pipeline, after their weights were made.
        self.zeropp = apply_zeropp(nn.ModuleList(self.model_parts), config.zeropp)
        if config.checkpoint.enable:
            self.checkpointer.states["zeropp"] = self.zeropp
        self._micro_batches = 0
        if chunks_loss:
            self.loss_fn = partial(self._backward_of_head_first, self.loss_fn)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        # torchtitan lets FSDP2 reduce at every micro-batch, and says nothing of the last.
        self._micro_batches += 1
        self.zeropp.set_is_last_micro_batch(self._is_last_micro_batch)
        return super().forward_backward_step(**batch)

    @property
    def _is_last_micro_batch(self) -> bool:
        return self._micro_batches % self.gradient_accumulation_steps == 0

    def _backward_of_head_first(self, loss_in_chunks: Any, *arguments: Any, **named: Any) -> Any:
        """The chunked loss, which backpropagates through ``lm_head`` by itself, before the rest does.

        Both passes reduce the unit that ``lm_head`` shares with the norm before it. As two micro-batches of one step
        would, they cross nodes once.
        """
        self.zeropp.set_is_last_micro_batch(False)
        loss = loss_in_chunks(*arguments, **named)
        self.zeropp.set_is_last_micro_batch(self._is_last_micro_batch)
        return loss


def with_zeropp(config: Trainer.Config, zeropp: ZeroPPConfig) -> ZeroPPTrainer.Config:
    """``config`` for ``ZeroPPTrainer``, without CUDA graphs."""
    values = {of.name: getattr(config, of.name) for of in fields(config)}
    values["training"] = replace(config.training, disable_cuda_graphs=True)
    return ZeroPPTrainer.Config(**values, zeropp=zeropp)
