"""Flags of Megatron-LM and Megatron-DeepSpeed that are settings here under another name.

{} is the flag's value; a dict has a translation for each value that the flag may have.
"""

from __future__ import annotations

from megatron_zpp.settings.checks import SettingsError

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
    "--topk": "--moe-router-topk {}",
    "--moe-loss-coeff": "--moe-aux-loss-coeff {}",
    "--moe-train-capacity-factor": "--moe-expert-capacity-factor {}",
    "--override-lr-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
}


def translate(name: str, words: list[str]) -> str:
    """What to write here for a flag of ``TRANSLATED`` and the words behind it."""
    meaning = TRANSLATED[name]
    takes_value = isinstance(meaning, dict) or "{}" in meaning
    if len(words) != takes_value:
        expected = "takes one value" if takes_value else "takes no value"
        raise SettingsError(f"{name} {expected}, got {' '.join(words) or 'none'}")
    if isinstance(meaning, str):
        return meaning.format(*words)
    if words[0] not in meaning:
        raise SettingsError(f"{name} must be one of {', '.join(meaning)}, got {words[0]}")
    return meaning[words[0]]
