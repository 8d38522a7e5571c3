"""ZeRO++ and LoCo under the Hugging Face Trainer: ``Trainer(..., callbacks=[ZeroPPCallback(config)])``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp


class ZeroPPCallback(TrainerCallback):
    """Applies ZeRO++ to the model that the Trainer has sharded (``TrainingArguments(fsdp=True)``).

    Its state goes into a folder of each of the Trainer's checkpoints, and comes back with
    ``trainer.train(resume_from_checkpoint=...)``.
    """

    def __init__(self, config: ZeroPPConfig) -> None:
        self.config = config
        self.zeropp: ZeroPP | None = None  # until training begins
        self._loss_scale = 1.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        if self.zeropp is None:  # train() may be called again
            self.zeropp = apply_zeropp(model, self.config)
        folder = _folder(args, state)
        if state.global_step > 0 and folder.exists():
            dcp.load({"zeropp": self.zeropp}, checkpoint_id=folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        dcp.save({"zeropp": self.zeropp}, checkpoint_id=_folder(args, state))


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "zeropp"
