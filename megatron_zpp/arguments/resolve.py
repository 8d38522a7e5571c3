"""Complete the settings of a run and check that they fit together, before anything is built.

One function per group: it checks what the user gave, fills what was left open, and returns the completed group. After
``resolve`` no field is None whose default can be derived: batch size, MLP width, dropout, recomputation, precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_zpp.arguments.check_islands import check_islands
from megatron_zpp.arguments.check_muon import check_muon
from megatron_zpp.arguments.check_zero import check_zero
from megatron_zpp.arguments.resolve_parallel import (
    cannot_tell_stragglers,
    check_expert_parallel,
    check_parallel,
    check_pipeline,
    check_tensor_parallel,
    data_parallel_size,
    resolve_schedule,
)
from megatron_zpp.families import Architecture
from megatron_zpp.optim.batch_size import BatchSchedule, Curriculum, end_after_tokens
from megatron_zpp.optim.schedule import Schedule
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD
from megatron_zpp.settings.checks import Mistakes, SettingsError, flag_of, require
from megatron_zpp.settings.groups import (
    ActivationSettings,
    CheckpointSettings,
    DataSettings,
    PrecisionSettings,
    ScheduleSettings,
    Settings,
    TokenizerSettings,
    TrainingSettings,
    all_flags,
)
from megatron_zpp.settings.resolved import ResolvedTraining
from megatron_zpp.zeropp.config import ZeroPPConfig


def resolve(
    architecture: Architecture,
    settings: Settings,
    given: Iterable[str],
    world_size: int,
    accumulation_steps: int | None = None,
) -> tuple[Settings, list[str]]:
    """Completed settings, and one note for each given setting that has no effect in this run.

    given: names of the fields that the user set. world_size: ranks of all jobs. accumulation_steps: micro-batches per
    optimizer step, where a DeepSpeed file says so. Raises SettingsError with all that is wrong, as far as it can be
    told: what is computed from wrong settings is not looked at.
    """
    mistakes, distributed, training = Mistakes(), settings.distributed, settings.training
    with mistakes.collected():
        architecture.check_parallel(distributed)
    with mistakes.collected():
        check_parallel(distributed, settings.zero.zero_stage, training.seq_length, world_size)
    with mistakes.collected():
        require(training.seq_length is not None, "how long is a sample? give --seq-length")
        model = architecture.resolve(settings.model, training.seq_length or 0)
        activation = _resolve_activation(settings.activation, model.num_layers)
    with mistakes.collected():
        precision = _resolve_precision(settings.precision, _sums_gradients_in_fp32(settings))
    with mistakes.collected():
        _check_data(settings.data)
    with mistakes.collected():
        tokenizer = _resolve_tokenizer(settings.tokenizer, settings.data)
    with mistakes.collected():
        _check_checkpoint(settings.checkpoint, settings.schedule)
    mistakes.report()

    dp_size = data_parallel_size(distributed, world_size)
    settings = dataclasses.replace(
        settings,
        model=model,
        activation=activation,
        precision=precision,
        tokenizer=tokenizer,
        zeropp=_resolve_zeropp(settings.zeropp, training, precision),
    )
    assert training.seq_length
    with mistakes.collected():
        check_pipeline(settings)
    with mistakes.collected():
        settings = dataclasses.replace(settings, training=_resolve_training(training, dp_size, accumulation_steps))
        settings = _resolve_length(settings, dp_size)
    with mistakes.collected():
        _check_curriculum(settings)
    with mistakes.collected():
        check_tensor_parallel(distributed, model, training.seq_length, activation.compile)
    with mistakes.collected():
        check_islands(settings, set(given))
    fsdp_size = dp_size // distributed.islands * distributed.context_parallel_size
    with mistakes.collected():
        check_expert_parallel(settings, fsdp_size)
    with mistakes.collected():
        require(
            not (settings.zero.cpu_offload and settings.optimizer.use_apex),
            "--use-apex steps on the GPU, --cpu-offload on the host; leave one out",
        )
        check_zero(settings.zero, settings.zeropp, fsdp_size, distributed)
    with mistakes.collected():
        check_muon(settings)
    mistakes.report()
    notes = [*_notes(settings, set(given))]
    if settings.logging.log_straggler and (reason := cannot_tell_stragglers(distributed, settings.zero, world_size)):
        notes.append(f"--log-straggler has no effect: {reason}")
        settings = dataclasses.replace(settings, logging=dataclasses.replace(settings.logging, log_straggler=False))
    return settings, notes


# Ranks and batches


def _resolve_training(training: TrainingSettings, dp_size: int, accumulation_steps: int | None) -> TrainingSettings:
    require(
        accumulation_steps is None or accumulation_steps >= 1,
        f"gradient_accumulation_steps must be at least 1, got {accumulation_steps}",
    )
    require(
        accumulation_steps is None or training.rampup_batch_size is None,
        f"gradient_accumulation_steps {accumulation_steps} fixes what --rampup-batch-size changes; leave one out",
    )
    micro, total = training.micro_batch_size, training.global_batch_size
    if micro is None and total is not None and accumulation_steps is not None:
        micro, rest = divmod(total, accumulation_steps * dp_size)
        require(
            rest == 0 and micro > 0,
            f"global batch size {total} is not divisible by {accumulation_steps} accumulation steps * "
            f"{dp_size} data-parallel ranks",
        )
    if micro is None:
        raise SettingsError("how many samples per rank and forward pass? give --micro-batch-size")
    training = dataclasses.replace(training, micro_batch_size=micro)
    expected = micro * (accumulation_steps or 1) * dp_size
    if total is None:
        total = expected
    require(
        accumulation_steps is None or total == expected,
        f"global batch size {total} is not micro-batch size {micro} * {accumulation_steps} accumulation steps * "
        f"{dp_size} data-parallel ranks = {expected}; make them agree or leave one out",
    )
    return dataclasses.replace(training, global_batch_size=total)


def _resolve_length(settings: Settings, dp_size: int) -> Settings:
    """End the run by its tokens, and build what the trainer will build: it refuses what it cannot do."""
    training = ResolvedTraining(**vars(settings.training))
    try:
        batches = BatchSchedule.from_settings(training, dp_size)
        if not training.skip_train:
            training = end_after_tokens(training, batches)
            Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)
            settings = dataclasses.replace(settings, distributed=resolve_schedule(settings.distributed, batches))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return dataclasses.replace(settings, training=training)


def _check_curriculum(settings: Settings) -> None:
    """Samples that are cut must still be divisible among ranks, and be one document each."""
    try:
        curriculum = Curriculum.from_settings(ResolvedTraining(**vars(settings.training)))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if curriculum is None:
        return
    ranks = settings.distributed
    parts = 2 * ranks.context_parallel_size if ranks.context_parallel_size > 1 else 1
    parts *= ranks.tensor_model_parallel_size if ranks.sequence_parallel else 1
    require(
        curriculum.step % parts == 0 and curriculum.last % parts == 0,
        f"--curriculum-length-step {curriculum.step} and the last length {curriculum.last} must be multiples of "
        f"{parts}, the parts into which --context-parallel-size and --sequence-parallel divide a sample",
    )
    require(
        not settings.data.reset_attention_mask,
        "--reset-attention-mask counts documents in whole samples, --curriculum-min-length cuts them; leave one out",
    )


# ZeRO++


def _resolve_zeropp(config: ZeroPPConfig, training: TrainingSettings, precision: PrecisionSettings) -> ZeroPPConfig:
    loco = config.loco
    if loco is not None:
        # In other runs a NaN or Inf undoes a step, which is rare, and LoCo then starts again.
        undoes_steps = precision.fp16 or training.loss_spike_factor is not None
        loco = dataclasses.replace(loco, exact_undo=undoes_steps)
    return dataclasses.replace(config, seed=training.seed, loco=loco)


# Precision and memory


def _sums_gradients_in_fp32(settings: Settings) -> bool:
    """Whether all that adds up gradients does it in fp32, whatever it is handed: qgZ on both hops, and no other."""
    zero, zeropp = settings.zero, settings.zeropp
    quantized = zeropp.quantized_gradients and None not in (zeropp.gradient_bits, zeropp.gradient_intra_bits)
    # Where micro-batches are reduced together, FSDP2 adds them up before.
    return quantized and zero.zero_stage >= 2 and settings.distributed.pipeline_schedule not in SPLITS_BACKWARD


def _resolve_precision(precision: PrecisionSettings, sums_in_fp32: bool) -> PrecisionSettings:
    require(not (precision.fp16 and precision.bf16), "--fp16 and --bf16 exclude each other; give one")
    require(precision.bf16 or not precision.grad_reduce_in_bf16, "--grad-reduce-in-bf16 needs --bf16")
    require(
        not (precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32),
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; give one",
    )
    first, smallest = precision.initial_loss_scale, precision.min_loss_scale
    require(
        not precision.fp16 or precision.loss_scale is not None or first >= smallest,
        f"--initial-loss-scale {first:g} is below --min-loss-scale {smallest:g}; raise the former or lower the latter",
    )
    # Megatron's rule: bf16 has too few digits to sum gradients in, so it is fp32 unless asked otherwise. Autograd's are
    # bf16, and half the memory, where they are only handed over.
    in_fp32 = precision.accumulate_allreduce_grads_in_fp32
    if precision.bf16 and not in_fp32 and not precision.grad_reduce_in_bf16:
        in_fp32 = not sums_in_fp32
        precision = dataclasses.replace(precision, grad_reduce_in_bf16=sums_in_fp32)
    return dataclasses.replace(precision, accumulate_allreduce_grads_in_fp32=in_fp32)


def _resolve_activation(activation: ActivationSettings, num_layers: int | None) -> ActivationSettings:
    asked = {
        "--recompute-granularity": activation.recompute_granularity,
        "--recompute-activations": "selective" if activation.recompute_activations else None,
        "--checkpoint-activations": "full" if activation.checkpoint_activations else None,
    }
    asked = {flag: granularity for flag, granularity in asked.items() if granularity is not None}
    require(
        len(set(asked.values())) <= 1,
        f"{' and '.join(f'{flag} (= {granularity})' for flag, granularity in asked.items())} differ; give one",
    )
    granularity = next(iter(asked.values()), None)
    method, layers = activation.recompute_method, activation.recompute_num_layers
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            require(getattr(activation, name) is None, f"{flag_of(name)} needs --recompute-granularity full")
    else:
        method, layers = method or "uniform", 1 if layers is None else layers
        assert num_layers
        require(
            1 <= layers <= num_layers,
            f"--recompute-num-layers {layers} must be between 1 and --num-layers {num_layers}",
        )
    return dataclasses.replace(
        activation, recompute_granularity=granularity, recompute_method=method, recompute_num_layers=layers
    )


# Data and checkpoints


def _check_data(data: DataSettings) -> None:
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(data, name)]
    whole = [name for name in ("data_path", "data_args_path") if getattr(data, name)]
    others = [name for name in ("mock_data", "per_split_data_args_path") if getattr(data, name)]
    sources = [flag_of(name) for name in (*whole, *others, *per_split[:1])]
    require(len(sources) > 0, "what to train on? give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    require(len(sources) == 1, f"{' and '.join(sources)} both say where the data is; give one")
    require(
        not (per_split or data.per_split_data_args_path) or data.split is None,
        f"--split divides --data-path; it has no meaning with {sources[0]}: leave it out",
    )
    require(
        data.dataloader_type == "cyclic" or not data.data_sharding, "--data-sharding needs --dataloader-type cyclic"
    )


def _resolve_tokenizer(tokenizer: TokenizerSettings, data: DataSettings) -> TokenizerSettings:
    if tokenizer.tokenizer_type is not None:
        return tokenizer
    if tokenizer.vocab_file is not None or tokenizer.merge_file is not None:  # as in Megatron
        return dataclasses.replace(tokenizer, tokenizer_type="GPT2BPETokenizer")
    if data.mock_data and tokenizer.vocab_size is not None:
        return dataclasses.replace(tokenizer, tokenizer_type="NullTokenizer")
    raise SettingsError(
        "which vocabulary? give --vocab-size with --mock-data"
        if data.mock_data
        else "which tokenizer was the data made with? give --tokenizer-type and its files, or --vocab-file and "
        "--merge-file of GPT2BPETokenizer"
    )


def _check_checkpoint(checkpoint: CheckpointSettings, schedule: ScheduleSettings) -> None:
    require(
        checkpoint.save is None or checkpoint.save_interval is not None,
        "how often to save? --save needs --save-interval",
    )
    needs_load = ("ckpt_step", "exit_on_missing_checkpoint", "finetune", "no_load_optim", "no_load_rng")
    for name in (*needs_load, "load_latest_good", "override_batch_size", "override_data"):
        require(not getattr(checkpoint, name) or checkpoint.load is not None, f"{flag_of(name)} needs --load")
    require(
        not (checkpoint.load_latest_good and checkpoint.ckpt_step is not None),
        "--load-latest-good and --ckpt-step both say which checkpoint to load; give one",
    )
    require(
        not (schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler),
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one",
    )


# Settings that mean something only beside another one


def check_needed(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise SettingsError for given flags without the ones they need.

    A ZeRO++ setting without its switch would leave the collectives unquantized unnoticed, and a head layout without
    its switch would train another network. values: what flags, DeepSpeed's file and preset say, the rest being off.
    """
    alone = [
        f"{flag.name} needs {flag_of(flag.needs)}"
        for flag in all_flags().values()
        if flag.needs is not None and flag.setting in given and not values.get(flag.needs)
    ]
    if alone:
        raise SettingsError(*alone)


OF_DYNAMIC_SCALES = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

# Left-overs of a script, which do no harm: a note.
_NO_EFFECT_WITHOUT = {
    "rope_scaling_factor": "use_rope_scaling",
    "fim_rate": "fim_data",
    "fim_spm_rate": "fim_data",
    "fim_prefix_token": "fim_data",
    "fim_middle_token": "fim_data",
    "fim_suffix_token": "fim_data",
    "loss_scale": "fp16",
    **dict.fromkeys(OF_DYNAMIC_SCALES, "fp16"),
    "manual_gc_interval": "manual_gc",
    "emulate_nodes": "emulate_ranks",
    "save_interval": "save",
    "no_save_optim": "save",
    "no_save_rng": "save",
    "no_async_save": "save",
    "save_retain_interval": "save",
    "save_keep_last": "save",
    "verify_checkpoint": "load",
    "wandb_exp_name": "wandb_project",
    "wandb_entity": "wandb_project",
    "wandb_save_dir": "wandb_project",
}


def _notes(settings: Settings, given: set[str]) -> Iterator[str]:
    values = settings.as_flat_dict()
    for name, needed in _NO_EFFECT_WITHOUT.items():
        if name in given and not values[needed]:
            yield f"{flag_of(name)} has no effect without {flag_of(needed)}"
    interval, steps = settings.island.sync_interval, settings.training.train_iters
    if settings.distributed.islands_may_leave and steps is not None and steps % interval:
        yield (
            f"the last {steps % interval} of {steps} steps are not in the outer parameters, which are evaluated and "
            f"saved: make --train-iters a multiple of --island-sync-interval {interval}"
        )
    if settings.distributed.sequence_parallel and settings.distributed.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect without --tensor-model-parallel-size"
    if settings.precision.fp16 and settings.precision.loss_scale is not None:
        for name in OF_DYNAMIC_SCALES:
            if name in given:
                yield f"{flag_of(name)} has no effect with a fixed --loss-scale"
    tokenizer = settings.tokenizer
    of_json = tokenizer.tokenizer_type == "TikTokenizer" and (tokenizer.tokenizer_model or "").endswith(".json")
    if "vocab_size" in given and tokenizer.tokenizer_type != "NullTokenizer" and not of_json:
        yield f"--vocab-size has no effect: {tokenizer.tokenizer_type} knows its own"
