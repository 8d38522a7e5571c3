"""ZeRO++ under the trainers of TRL, in one line: ``with_zeropp(GRPOTrainer(...), config).train()``."""

from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from megatron_zpp.integrations.huggingface import ZeroPPCallback
from megatron_zpp.zeropp import ZeroPPConfig

TRL_TRAINER = TypeVar("TRL_TRAINER", bound=Trainer)
# Attributes that hold models beside the policy; ``reward_funcs`` also holds functions.
OTHER_MODELS = ("ref_model", "reward_model", "value_model", "teacher_model")


def with_zeropp(trainer: TRL_TRAINER, config: ZeroPPConfig, resident_weights: bool = True) -> TRL_TRAINER:
    """Apply ZeRO++ to all models of ``trainer`` that are sharded, when it trains; return the trainer.

    The reference, reward and other models get the settings of the policy's weights, so all round in the same way.
    resident_weights: keep gathered weights on every rank (``ZeroPP.resident_weights``): rollouts, reference passes and
    further epochs gather nothing until the weights change. A rank needs memory for the codes of all models.
    """
    held: list[Any] = [getattr(trainer, name, None) for name in OTHER_MODELS]
    held += getattr(trainer, "reward_funcs", [])
    models = [model for model in held if isinstance(model, nn.Module)]
    others = [model for model in models if any(isinstance(module, FSDPModule) for module in model.modules())]
    trainer.add_callback(ZeroPPCallback(config, others, resident_weights))
    return trainer
