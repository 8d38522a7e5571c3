"""ZeRO++ and LoCo under the Hugging Face Trainer: ``Trainer(..., callbacks=[ZeroPPCallback(config)])``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp

logger = logging.getLogger(__name__)


class ZeroPPCallback(TrainerCallback):
    """Applies ZeRO++ to the model that the Trainer has sharded (``TrainingArguments(fsdp=True)``).

    Each of the Trainer's checkpoints gets a folder with its state, which
    ``trainer.train(resume_from_checkpoint=...)`` loads.
    """

    def __init__(self, config: ZeroPPConfig) -> None:
        self.config = config
        self.zeropp: ZeroPP | None = None  # until training begins
        self._loss_scale: float | None = None  # of fp16's gradients, since the first step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        if self.zeropp is None:  # train() may be called again
            self.zeropp = apply_zeropp(kw["model"], self.config)
        folder = _folder(args, state)
        if folder.exists():
            dcp.load({"zeropp": self.zeropp}, checkpoint_id=folder)
        elif state.global_step > 0 and self.zeropp.is_logging_rank:
            logger.warning("no state of ZeRO++ in %s: LoCo's errors and weight differences start again", folder)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        assert self.zeropp is not None
        optimizer = kw["optimizer"]  # accelerate's
        if optimizer.step_was_skipped:  # fp16 gradients overflowed
            self.zeropp.undo_step()
        if optimizer.scaler is not None:
            scale = optimizer.scaler.get_scale()
            self.zeropp.rescale_errors(scale / (self._loss_scale or scale))
            self._loss_scale = scale

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        dcp.save({"zeropp": self.zeropp}, checkpoint_id=_folder(args, state))


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None  # TrainingArguments has a default
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "zeropp"
