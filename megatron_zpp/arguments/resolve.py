"""Complete the settings of a run and check that they fit together, before anything is built.

After ``resolve`` no field is None whose default can be derived: batch size, MLP width, dropout, precision.
"""

import dataclasses
from collections.abc import Collection
from typing import cast

from megatron_zpp.arguments import resolve_parallel
from megatron_zpp.arguments.check_zero import check_islands, check_muon, check_zero
from megatron_zpp.arguments.no_effect import notes_on
from megatron_zpp.arguments.recipe import with_warmup
from megatron_zpp.arguments.resolve_compute import check_float8, resolve_activation, resolve_precision
from megatron_zpp.data.sources import SOURCES, chosen_sources
from megatron_zpp.families import Architecture
from megatron_zpp.files import is_url
from megatron_zpp.optim.batch_size import BatchSchedule, Curriculum, end_after_tokens, read_steps
from megatron_zpp.optim.schedule import Schedule
from megatron_zpp.settings.checks import Mistakes, SettingsError, flag_of, require
from megatron_zpp.settings.groups import (
    CheckpointSettings,
    DataSettings,
    LoggingSettings,
    ScheduleSettings,
    Settings,
    TokenizerSettings,
    TrainingSettings,
    all_flags,
)
from megatron_zpp.settings.resolved import ResolvedTraining


def resolve(
    architecture: Architecture,
    settings: Settings,
    given: Collection[str],
    world_size: int,
    accumulation_steps: int | None = None,
) -> tuple[Settings, list[str]]:
    """Complete the settings, and note each ``given`` setting that has no effect in this run.

    world_size: ranks of all jobs. accumulation_steps: micro-batches per optimizer step, where a DeepSpeed file says so.
    Raises SettingsError with all mistakes, but for those that wrong settings may cause.
    """
    mistakes, distributed, training = Mistakes(), settings.distributed, settings.training
    seq_length = training.seq_length or 0
    if settings.data.sft:  # answers differ in length: a mean of micro-batches' means would weigh their tokens unequally
        training = dataclasses.replace(training, calculate_per_token_loss=True)
    with mistakes.collected():
        architecture.check_parallel(distributed)
    with mistakes.collected():
        resolve_parallel.check_parallel(distributed, training.seq_length, world_size)
    with mistakes.collected():
        require(seq_length, "how long is a sample? give --seq-length")
        model = architecture.resolve(settings.model, seq_length)
        num_layers = model.num_layers or 0
        distributed = resolve_parallel.resolve_sizes(distributed, num_layers)
        activation = resolve_activation(settings.activation, num_layers)
    with mistakes.collected():
        precision = resolve_precision(settings)
    with mistakes.collected():
        _check_data(settings.data)
    with mistakes.collected():
        tokenizer = _resolve_tokenizer(settings.tokenizer, settings.data)
    with mistakes.collected():
        _check_checkpoint(settings.checkpoint, settings.schedule, settings.logging)
    mistakes.report()

    dp_size, zeropp = resolve_parallel.data_parallel_size(distributed, world_size), settings.zeropp
    # In other runs a NaN or Inf undoes a step, which is rare, and LoCo then starts again.
    undoes_steps = precision.fp16 or training.loss_spike_factor is not None
    loco = None if zeropp.loco is None else dataclasses.replace(zeropp.loco, exact_undo=undoes_steps)
    zeropp = dataclasses.replace(zeropp, seed=training.seed, loco=loco)
    settings = dataclasses.replace(
        settings,
        model=model,
        activation=activation,
        precision=precision,
        tokenizer=tokenizer,
        zeropp=zeropp,
        distributed=distributed,
    )
    with mistakes.collected():
        resolve_parallel.check_pipeline(settings)
    with mistakes.collected():
        settings = dataclasses.replace(settings, training=_resolve_training(training, dp_size, accumulation_steps))
        settings = with_warmup(_resolve_length(settings, dp_size), given, dp_size)
    for check in (_check_curriculum, _check_lora, resolve_parallel.check_tensor_parallel, check_float8, check_muon):
        with mistakes.collected():
            check(settings)
    with mistakes.collected():
        check_islands(settings, given)
    fsdp_size = dp_size // distributed.islands * distributed.context_parallel_size
    for check_sharding in (resolve_parallel.check_expert_parallel, check_zero):
        with mistakes.collected():
            check_sharding(settings, fsdp_size)
    with mistakes.collected():
        is_divided = dp_size == world_size and distributed.islands == 1
        alone = "--eval-tasks divides its requests among data-parallel ranks alone: leave tensor, pipeline and context"
        instead = "megatron-zpp evaluate takes the checkpoints of such a run"
        require(training.eval_tasks is None or is_divided, f"{alone} parallelism and islands out; {instead}")
    mistakes.report()
    notes = [*notes_on(settings, set(given))]
    reason = resolve_parallel.cannot_tell_stragglers(distributed, settings.zero, world_size)
    if settings.logging.log_straggler and reason is not None:
        notes.append(f"--log-straggler has no effect: {reason}")
        settings = dataclasses.replace(settings, logging=dataclasses.replace(settings.logging, log_straggler=False))
    return settings, notes


def _resolve_training(training: TrainingSettings, dp_size: int, accumulation_steps: int | None) -> TrainingSettings:
    if accumulation_steps is not None:
        given = f"gradient_accumulation_steps {accumulation_steps}"
        require(accumulation_steps >= 1, f"{given} must be at least 1")
        for name in ("rampup_batch_size", "step_batch_size_schedule"):
            require(getattr(training, name) is None, f"{given} fixes what {flag_of(name)} changes; leave one out")
    micro, total, steps = training.micro_batch_size, training.global_batch_size, training.step_batch_size_schedule
    if steps is not None:
        try:
            last = read_steps(steps, training.seq_length or 1)[-1][1]
        except ValueError as error:
            raise SettingsError(str(error)) from error
        require(training.rampup_batch_size is None, "--step-batch-size-schedule and --rampup-batch-size: give one")
        total = last if total is None else total
        require(total == last, f"--step-batch-size-schedule ends at {last}, not at --global-batch-size {total}")
    if micro is None and total is not None and accumulation_steps is not None:
        micro, rest = divmod(total, accumulation_steps * dp_size)
        parts = f"{accumulation_steps} accumulation steps * {dp_size} data-parallel ranks"
        require(rest == 0 and micro > 0, f"global batch size {total} is not divisible by {parts}")
    if micro is None:
        raise SettingsError("how many samples per rank and forward pass? give --micro-batch-size")
    training = dataclasses.replace(training, micro_batch_size=micro)
    expected = micro * (accumulation_steps or 1) * dp_size
    total = expected if total is None else total
    product = f"micro-batch size {micro} * {accumulation_steps} accumulation steps * {dp_size} ranks = {expected}"
    require(accumulation_steps is None or total == expected, f"global batch size {total} is not {product}")
    return dataclasses.replace(training, global_batch_size=total)


def _resolve_length(settings: Settings, dp_size: int) -> Settings:
    """End the run by its tokens. Builds the schedules that the trainer will build, which refuse what cannot work."""
    training = cast(ResolvedTraining, settings.training)
    try:
        batches = BatchSchedule.from_settings(training, dp_size)
        if not training.skip_train:
            training = end_after_tokens(training, batches)
            Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)
        distributed = resolve_parallel.resolve_schedule(settings.distributed, batches)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return dataclasses.replace(settings, training=training, distributed=distributed)


def _check_curriculum(settings: Settings) -> None:
    """Check that cut samples can still be divided among ranks, and are one document each."""
    try:
        curriculum = Curriculum.from_settings(cast(ResolvedTraining, settings.training))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if curriculum is None:
        return
    ranks = settings.distributed
    parts = 2 * ranks.context_parallel_size if ranks.context_parallel_size > 1 else 1
    parts *= ranks.tensor_model_parallel_size if ranks.sequence_parallel else 1
    uneven = f"samples grow by {curriculum.step} tokens to --seq-length {curriculum.last}: no multiples of {parts}"
    divided = "the parts into which --context-parallel-size and --sequence-parallel divide a sample"
    require(curriculum.step % parts == 0 and curriculum.last % parts == 0, f"{uneven}, {divided}")
    counted = "--reset-attention-mask and --sft count whole samples; leave them or --curriculum-min-length out"
    require(not settings.data.reset_attention_mask and not settings.data.sft, counted)


def _check_lora(settings: Settings) -> None:
    lora, ranks = settings.lora, settings.distributed
    if lora.lora_rank is None:
        return
    require(lora.pretrained_checkpoint, "adapters of which weights? --lora-rank needs --pretrained-checkpoint")
    sizes = (ranks.tensor_model_parallel_size, ranks.pipeline_model_parallel_size, ranks.islands)
    require(
        max(sizes) == 1 and settings.model.num_experts is None,
        "--lora-rank works with data and context parallelism: leave tensor and pipeline parallelism, islands and "
        "experts out",
    )


def _check_data(data: DataSettings) -> None:
    chosen = chosen_sources(data)
    flags = [all_flags()[source.settings[0]] for source in SOURCES]
    *others, last = [f"{flag.name} {flag.metavar or ''}".strip() for flag in flags]
    require(chosen, f"what to train on? give {', '.join(others)} or {last}")
    given = [flag_of(name) for name in chosen]
    require(len(given) == 1, f"{' and '.join(given)} both say where the data is; give one")
    (source,) = chosen.values()
    chats = "--sft, which shuffles whole chats in each epoch and has their loss masks"
    excluded = dict.fromkeys(source.excludes, given[0])
    if data.sft:
        excluded |= dict.fromkeys(("eod_mask_loss", "dataloader_type"), chats)
    for name, other in excluded.items():
        flag = all_flags()[name]
        require(getattr(data, name) == flag.default, f"{flag.name} does not go with {other}; leave one out")
    try:
        source.check(data)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _resolve_tokenizer(tokenizer: TokenizerSettings, data: DataSettings) -> TokenizerSettings:
    if tokenizer.tokenizer_type is not None:
        return tokenizer
    if tokenizer.vocab_file is not None or tokenizer.merge_file is not None:  # as in Megatron
        return dataclasses.replace(tokenizer, tokenizer_type="GPT2BPETokenizer")
    for name, source in chosen_sources(data).items():
        if not source.reads_text:
            require(tokenizer.vocab_size is not None, f"which vocabulary? give --vocab-size with {flag_of(name)}")
            return dataclasses.replace(tokenizer, tokenizer_type="NullTokenizer")
    raise SettingsError("which tokenizer made the data? give --tokenizer-type, or --vocab-file and --merge-file")


def _check_checkpoint(checkpoint: CheckpointSettings, schedule: ScheduleSettings, logging: LoggingSettings) -> None:
    has_interval = checkpoint.save_interval is not None
    require(checkpoint.save is None or has_interval, "how often to save? --save needs --save-interval")
    has_folder = bool(logging.metrics_dir or logging.tensorboard_dir) or not is_url(checkpoint.save)
    require(has_folder, "--save in a bucket needs --metrics-dir DIR, a folder here for metrics.jsonl")
    both = "--load-latest-good and --ckpt-step both say which checkpoint to load; give one"
    require(not (checkpoint.load_latest_good and checkpoint.ckpt_step is not None), both)
    both = "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one"
    require(not (schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler), both)
