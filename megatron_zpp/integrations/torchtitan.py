"""ZeRO++ and LoCo under torchtitan's trainer: ``with_zeropp(llama3_8b(), ZeroPPConfig(...))`` is one more config."""

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
            raise ValueError("a CUDA graph repeats what ZeRO++ sent at first: set --training.disable_cuda_graphs")
        chunks_loss = isinstance(config.loss, ChunkedLossWrapper.Config)
        if chunks_loss and config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "ChunkedLossWrapper reduces lm_head's FSDP2 unit twice in each micro-batch, and in a pipeline ZeRO++ "
                "cannot tell when: take the loss inside, config.loss = config.loss.loss_fn"
            )
        super().__init__(config)
        # All pipeline stages of this rank, after their weights were made.
        self.zeropp = apply_zeropp(nn.ModuleList(self.model_parts), config.zeropp)
        if config.checkpoint.enable:
            self.checkpointer.states["zeropp"] = self.zeropp
        self._num_micro_batches, self._is_last = 0, False
        if chunks_loss:
            self.loss_fn = partial(self._chunked_loss, self.loss_fn)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        # torchtitan lets FSDP2 reduce at every micro-batch, and does not mark the last.
        self._num_micro_batches += 1
        self._is_last = self._num_micro_batches % self.gradient_accumulation_steps == 0
        self.zeropp.set_is_last_micro_batch(self._is_last)
        return super().forward_backward_step(**batch)

    def _chunked_loss(self, loss_in_chunks: Any, *arguments: Any, **named: Any) -> Any:
        """Compute the chunked loss, which backpropagates through ``lm_head`` before the rest of the model does.

        Both passes reduce the unit that ``lm_head`` shares with the norm before it. Like two micro-batches of one step,
        they cross nodes once.
        """
        self.zeropp.set_is_last_micro_batch(False)
        loss = loss_in_chunks(*arguments, **named)
        self.zeropp.set_is_last_micro_batch(self._is_last)
        return loss


def with_zeropp(config: Trainer.Config, zeropp: ZeroPPConfig) -> ZeroPPTrainer.Config:
    """Return ``config`` for ``ZeroPPTrainer``, without CUDA graphs."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    values["training"] = replace(config.training, disable_cuda_graphs=True)
    return ZeroPPTrainer.Config(**values, zeropp=zeropp)
