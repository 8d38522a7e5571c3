"""ZeRO++ and LoCo under the Hugging Face Trainer: ``Trainer(..., callbacks=[ZeroPPCallback(config)])``."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp

logger = logging.getLogger(__name__)


class ZeroPPCallback(TrainerCallback):
    """Applies ZeRO++ to the model that the Trainer has sharded; the Trainer's checkpoints keep its state, too.

    other_models: sharded models that are not trained, such as the reference of DPO; their weights are sent, too.
    resident_weights: keep what is gathered while the Trainer trains, see ``ZeroPP.resident_weights``.
    """

    def __init__(
        self, config: ZeroPPConfig, other_models: Sequence[nn.Module] = (), resident_weights: bool = False
    ) -> None:
        self.config, self.other_models, self.resident_weights = config, other_models, resident_weights
        self.zeropp: ZeroPP | None = None  # until training begins
        self.others: list[ZeroPP] = []  # one per model in ``other_models``
        self._training = ExitStack()
        self._loss_scale: float | None = None  # scale of fp16's gradients before this step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        if self.zeropp is None:  # train() may be called again
            self.zeropp = apply_zeropp(kw["model"], self.config)
            self.others = [apply_zeropp(model, self.config.for_weights()) for model in self.other_models]
        self._training.close()  # an exception may have ended the last training
        self._loss_scale = None
        for zeropp in (self.zeropp, *self.others) if self.resident_weights else ():
            self._training.enter_context(zeropp.resident_weights())
        folder = _folder(args, state)
        if folder.exists():
            dcp.load({"zeropp": self.zeropp}, checkpoint_id=folder)
        elif state.global_step > 0 and self.zeropp.is_logging_rank:
            logger.warning("no state of ZeRO++ in %s: LoCo's errors and weight differences start again", folder)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        scaler = getattr(kw["optimizer"], "scaler", None)  # accelerate's optimizer holds it
        if scaler is not None and self._loss_scale is None:
            self._loss_scale = scaler.get_scale()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        assert self.zeropp is not None
        if self._loss_scale is None:
            return
        scale = kw["optimizer"].scaler.get_scale()
        if scale < self._loss_scale:  # fp16 gradients overflowed. accelerate does not see what fused optimizers skip
            self.zeropp.undo_step()
        self.zeropp.rescale_errors(scale / self._loss_scale)
        self._loss_scale = scale

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        # TRL moves the reference towards the policy, and writes it by means that leave no trace.
        if getattr(args, "sync_ref_model", False) and state.global_step % vars(args)["ref_model_sync_steps"] == 0:
            for zeropp in self.others:
                zeropp.invalidate()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self._training.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        dcp.save({"zeropp": self.zeropp}, checkpoint_id=_folder(args, state))


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None  # TrainingArguments has a default
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "zeropp"
