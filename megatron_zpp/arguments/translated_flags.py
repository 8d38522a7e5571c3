"""Flags of Megatron-LM and Megatron-DeepSpeed that are settings here under another name.

{} and {0} are the flag's value; a dict has a translation for each value that the flag may have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_zpp.settings.checks import SettingsError

# Megatron-DeepSpeed's blocks with experts are the last of each so many, Megatron-LM's the first.
_EXPERT_INTERVAL = "--moe-layer-freq {0} --moe-first-layer {0}"

TRANSLATED: dict[str, str | dict[str, str]] = {
    "--layernorm-epsilon": "--norm-epsilon {}",
    "--num-key-value-heads": "--group-query-attention --num-query-groups {}",
    "--ds-sequence-parallel-size": "--context-parallel-size {}",
    "--enable-zbh1-pipeline": "--pipeline-schedule zero-bubble",
    "--activations-checkpoint-method": "--recompute-granularity full --recompute-method {}",
    "--activations-checkpoint-granularity": "--recompute-granularity {}",
    "--activations-checkpoint-num-layers": "--recompute-num-layers {}",
    "--checkpoint-num-layers": "--recompute-num-layers {}",
    "--cpu-optimizer": "--cpu-offload",
    "--optimizer-cpu-offload": "--cpu-offload",
    "--data-parallel-sharding-strategy": {
        "no_shard": "--zero-stage 0",
        "optim": "--zero-stage 1",
        "optim_grads": "--zero-stage 2",
        "optim_grads_params": "--zero-stage 3",
    },
    "--use-rotary-position-embeddings": "--position-embedding-type rope",
    "--moe-expert-parallel-size": "--expert-model-parallel-size {}",
    "--mlp-type": {"standard": "", "residual": "--moe-residual"},
    "--expert-interval": _EXPERT_INTERVAL,
    "--topk": "--moe-router-topk {}",
    "--moe-loss-coeff": "--moe-aux-loss-coeff {}",
    "--moe-train-capacity-factor": "--moe-expert-capacity-factor {}",
    "--override-lr-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
}


def translate(name: str, words: list[str]) -> str:
    """What to write here for a flag of ``TRANSLATED`` and the words behind it."""
    meaning = TRANSLATED[name]
    takes_value = isinstance(meaning, dict) or "{" in meaning
    if len(words) != takes_value:
        expected = "takes one value" if takes_value else "takes no value"
        raise SettingsError(f"{name} {expected}, got {' '.join(words) or 'none'}")
    if isinstance(meaning, str):
        return meaning.format(*words)
    if words[0] not in meaning:
        raise SettingsError(f"{name} must be one of {', '.join(meaning)}, got {words[0]}")
    return meaning[words[0]]


# Flags of experts that Megatron-DeepSpeed alone has, and what it does where a script with one of them says no more.
DEEPSPEEDS_EXPERTS = (
    "--moe-expert-parallel-size",
    "--moe-loss-coeff",
    "--moe-train-capacity-factor",
    "--expert-interval",
    "--topk",
)
_UNSAID = {
    "moe_router_topk": "--moe-router-topk 1",
    "moe_layer_freq": _EXPERT_INTERVAL.format(2),
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff 0.1",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor 1.0",
    "moe_eval_capacity_factor": "--moe-eval-capacity-factor 1.0",
    "moe_min_capacity": "--moe-min-capacity 4",
}


def unsaid_of_experts(typed: Collection[str], given: Mapping[str, Any]) -> str:
    """The flags for what a script of Megatron-DeepSpeed leaves to its defaults; "" for other scripts.

    typed: flags of the command line. given: settings that they have set.
    """
    if not set(DEEPSPEEDS_EXPERTS) & set(typed):
        return ""
    unsaid = [words for setting, words in _UNSAID.items() if setting not in given]
    if given.get("moe_router_topk", 1) == 1:  # the weight of a single expert is its score among all
        unsaid += ["--moe-router-pre-softmax"]
    return " ".join(unsaid)
