"""Given settings that have no effect: refused without the flag that they need, or noted as left-overs of a script."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from megatron_zpp.settings.checks import SettingsError, flag_of
from megatron_zpp.settings.groups import Settings, all_flags


def check_needed(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise SettingsError for given flags without the ones they need.

    A ZeRO++ setting without its switch would leave the collectives unquantized unnoticed, and a head layout without
    its switch would train another network. values: from flags, DeepSpeed's file and preset; all others are off.
    """
    on = {setting for setting in given if values[setting] is not False}
    needs = {flag.name: flag.needs for flag in all_flags().values() if flag.needs and flag.setting in on}
    alone = [f"{name} needs {flag_of(needed)}" for name, needed in needs.items() if not values.get(needed)]
    if alone:
        raise SettingsError(*alone)


DYNAMIC_SCALE_SETTINGS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

# Left-overs of a script, which do no harm: a note for each.
_NO_EFFECT_WITHOUT: dict[str | tuple[str, str], tuple[str, ...]] = {  # a setting, or one with its value
    "use_rope_scaling": ("rope_scaling_factor",),
    "fim_data": ("fim_rate", "fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"),
    "fp16": ("loss_scale", *DYNAMIC_SCALE_SETTINGS),
    "fp8_format": ("fp8_recipe", "first_last_layers_bf16"),
    "first_last_layers_bf16": ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ("recompute_granularity", "selective"): ("recompute_modules",),
    "manual_gc": ("manual_gc_interval",),
    "save": (
        *("save_interval", "save_retain_interval", "save_keep_last", "no_save_optim", "no_save_rng", "no_async_save"),
        "overwrite_save",
    ),
    "load": ("verify_checkpoint", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    "wandb_project": ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
    "tensorboard_dir": ("tensorboard_queue_size",),
    ("zeropp", "auto"): ("zeropp_redecide", "zeropp_loss_budget"),
    ("optimizer", "sgd"): ("sgd_momentum",),
    ("optimizer", "muon"): (
        *("muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor"),
        *("muon_period", "muon_momentum_bits", "muon_stale_rows"),
    ),
    ("lr_decay_style", "WSD"): ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
}


_LOGGED = (
    *("tensorboard_log_interval", "log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard"),
    *("log_memory_to_tensorboard", "log_world_size_to_tensorboard"),
)
_OF_PIPELINES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_WARMUPS = ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens")
_FILES_OF_TOKENIZERS: dict[str, tuple[str, ...]] = {  # and --tokenizer-model of all others
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    **dict.fromkeys(
        ("HuggingFaceTokenizer", "HFTokenizer"), ("tokenizer_model", "tokenizer_hf_no_include_special_tokens")
    ),
    "TikTokenizer": ("tokenizer_model", "tiktoken_pattern", "tiktoken_num_special_tokens"),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}


def lost_under_muon(settings: Settings) -> str | None:
    """Say what 1-bit gradients lost under Muon, if a run has both."""
    has_both = settings.zeropp.gradient_bits == 1 and settings.optimizer.optimizer == "muon"
    return "1-bit gradients lost 2 % of loss under Muon (docs/evidence/experiments.md, E12)" if has_both else None


def notes_on(settings: Settings, given: set[str]) -> Iterator[str]:
    """Yield a note for each ``given`` setting that has no effect in this run, and for what a run does unexpectedly."""
    values = settings.as_flat_dict()
    for needed, names in _NO_EFFECT_WITHOUT.items():
        setting, value = needed if isinstance(needed, tuple) else (needed, "")
        is_on = values[setting] == value if value else values[setting]
        for name in names:
            if name in given and not is_on:
                yield f"{flag_of(name)} has no effect without {flag_of(setting)} {value}".rstrip()
    zeropp, logging = settings.zeropp, settings.logging
    in_int8 = zeropp.hpz_secondary_dtype == "int8"
    is_quantized = zeropp.quantized_weights or zeropp.quantized_gradients or in_int8 or zeropp.frozen_dtype
    for name in ("zeropp_scale_dtype", "zeropp_monitor_interval"):
        if name in given and not is_quantized:
            yield f"{flag_of(name)} has no effect: this run quantizes nothing"
    if settings.optimizer.use_apex and settings.distributed.tensor_model_parallel_size > 1:
        yield "--use-apex leaves norms to torch under --tensor-model-parallel-size"
    if (loses := lost_under_muon(settings)) is not None:
        yield f"{loses}: use --zeropp int8"
    for names, is_on, why in (
        (_LOGGED, logging.tensorboard_dir or logging.wandb_project, "--tensorboard-dir or --wandb-project"),
        (_OF_PIPELINES, settings.distributed.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size"),
        (("lr_warmup_style", "lr_warmup_init"), any(values[name] for name in _WARMUPS), "a warm-up"),
    ):
        for name in names:
            if name in given and not is_on:
                yield f"{flag_of(name)} has no effect without {why}"
    if settings.distributed.context_parallel_size > 1 and settings.model.moe_expert_capacity_factor is not None:
        yield (
            "with --context-parallel-size each rank counts --moe-expert-capacity-factor in its own part of a sample: "
            "it drops other tokens than one rank would"
        )
    training = settings.training
    batches_grow = training.rampup_batch_size or training.step_batch_size_schedule
    if training.train_tokens and not training.curriculum_min_length and (training.train_samples or not batches_grow):
        samples = training.train_samples or (training.train_iters or 0) * (training.global_batch_size or 0)
        tokens = samples * (training.seq_length or 0)
        if tokens > training.train_tokens:
            yield f"--train-tokens {training.train_tokens} ends with the step that reaches it, after {tokens} tokens"
    if "moe_router_pre_softmax" in given and settings.model.moe_router_score_function == "sigmoid":
        yield "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid, as in Megatron"
    if settings.distributed.sequence_parallel and settings.distributed.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect without --tensor-model-parallel-size"
    if settings.precision.fp16 and settings.precision.loss_scale is not None:
        for name in DYNAMIC_SCALE_SETTINGS:
            if name in given:
                yield f"{flag_of(name)} has no effect with a fixed --loss-scale"
    tokenizer = settings.tokenizer
    has_json = tokenizer.tokenizer_type == "TikTokenizer" and (tokenizer.tokenizer_model or "").endswith(".json")
    if "vocab_size" in given and tokenizer.tokenizer_type != "NullTokenizer" and not has_json:
        yield f"--vocab-size has no effect: {tokenizer.tokenizer_type} knows its own"
    read = _FILES_OF_TOKENIZERS.get(tokenizer.tokenizer_type or "", ("tokenizer_model",))
    for name in sorted({"tokenizer_model", *chain.from_iterable(_FILES_OF_TOKENIZERS.values())}):
        if name in given and name not in read:
            yield f"{flag_of(name)} has no effect: {tokenizer.tokenizer_type} does not read it"
