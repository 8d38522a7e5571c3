"""Build everything that a run needs from its settings, and load its checkpoint."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.arguments.resolve_parallel import check_vocabulary
from megatron_zpp.arguments.settings_file import changed_settings
from megatron_zpp.checkpoint import CheckpointError, FolderLock, load_base, load_checkpoint, read_meta
from megatron_zpp.checkpoint.folder import describe_empty
from megatron_zpp.checkpoint.meta import Counters, num_tokens, saved_model
from megatron_zpp.checkpoint.resume import (
    check_not_overwritten,
    check_same_data,
    check_settings,
    checkpoint_to_load,
    goes_on_in,
)
from megatron_zpp.checkpoint.tokenizer import check_same_ids
from megatron_zpp.data.text.description import check_same_tokenizer, describe_tokenizer
from megatron_zpp.families import Architecture, vocabulary_of
from megatron_zpp.families.decoder_only import EXPERT_FLAGS, FLAGS
from megatron_zpp.integrations.float8 import check_float8
from megatron_zpp.islands import OuterSync
from megatron_zpp.metrics.writers import MetricWriters, RunStart, check_writers, describe_program
from megatron_zpp.models.bf16_products import prepare_products
from megatron_zpp.models.transformer import TransformerConfig
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.optim.optimizer import build_optimizer
from megatron_zpp.optim.schedule import Schedule, resume_schedule
from megatron_zpp.parallel.distributed import errors_on_all_ranks, print_once
from megatron_zpp.parallel.mesh import AXES, Mesh, ranks_per_model_copy
from megatron_zpp.settings.flags import setting_of
from megatron_zpp.settings.groups import CheckpointSettings, LoraSettings
from megatron_zpp.settings.model import ShapeSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.data import (
    build_data,
    check_same_data_on_all_ranks,
    find_tokenizer,
    load_tasks,
    resume_streams,
)
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.training.model import ModelBuilder
from megatron_zpp.training.profile import check_profile
from megatron_zpp.training.trainer import RunPlan, Trainer
from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.recipes import AUTO

# Fields that fine-tuning and --override-model may change: how long texts are read, and how experts are kept busy. No
# tensor does. Of positions, rotary ones may become YaRN's.
CHANGEABLE = {
    *("rotary_base", "rotary_base_local", "rotary_seq_len_interpolation_factor", "rope_scaling_factor"),
    *("yarn_scaling_factor", "yarn_original_context", "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim"),
    *("no_yarn_correction_range_round_to_int", "position_embedding_type"),
    *("window_size", "window_attn_skip_freq", "moe.load_balancing", "moe.aux_loss_coeff", "moe.z_loss_coeff"),
    *("moe.expert_capacity_factor", "moe.eval_capacity_factor", "moe.min_capacity"),
}
FIELDS = {setting: name for name, setting in FLAGS.items()}  # {setting of a flag: its field in the config}
FIELDS |= {setting: f"moe.{name}" for name, setting in EXPERT_FLAGS.items()}


def check_machine(settings: ResolvedSettings, device: torch.device) -> None:
    """Refuse, on all ranks, what this machine lacks, and folders of other runs.

    ``check_machine``, ``plan_run`` and ``ModelBuilder.build_parts`` refuse all that a run refuses before its first
    step, and write nothing but indices of data: a dry run calls them, too.
    """
    with errors_on_all_ranks():
        if settings.precision.fp8_format is not None:
            check_float8(device)
        check_profile(settings)
        check_writers(settings.logging)
        if dist.get_rank() == 0:
            check_not_overwritten(settings.checkpoint)


def plan_run(architecture: Architecture, settings: ResolvedSettings, mesh: Mesh) -> RunPlan:
    """Find the checkpoint and the data, and refuse, on all ranks, what does not fit the run."""
    training, batches = settings.training, BatchSchedule.from_settings(settings.training, mesh.dp_size)
    checkpoint, base, finetunes = checkpoint_to_load(settings.checkpoint), None, settings.checkpoint.finetune
    if (folder := settings.lora.pretrained_checkpoint) is not None:
        base = checkpoint_to_load(CheckpointSettings(load=folder))
    meta, resumed, counters, notes, unpadded = None, None, Counters(), list[str](), False
    with errors_on_all_ranks():
        tokenizer = find_tokenizer(settings.tokenizer)
        described = describe_tokenizer(settings.tokenizer.tokenizer_type, tokenizer)
        vocab_size = vocabulary_of(settings.model, tokenizer.vocab_size)
        check_vocabulary(settings.distributed, vocab_size, settings.model.make_vocab_size_divisible_by)
        config = architecture.build_config(settings.model, vocab_size)
        if checkpoint is not None:  # before data, which differ with the model
            meta = read_meta(checkpoint)
            unpadded = meta.get("unpadded_vocabulary", False)
            notes += _check_same_model(architecture, settings, checkpoint, meta, config, finetunes=finetunes)
            notes += check_settings(settings, meta, finetunes)
            if not finetunes:
                resumed, counters = meta, Counters.from_meta(meta)
            elif not settings.checkpoint.override_data:
                notes += check_same_ids(described, checkpoint, meta)
        if base is not None:
            found = read_meta(base)
            unpadded = found.get("unpadded_vocabulary", False)
            notes += _check_same_model(architecture, settings, base, found, config, finetunes=True, has_adapters=False)
            notes += check_settings(settings, found, finetunes=True) + check_same_ids(described, base, found)
    _print_notes(notes)
    train_iters, num_eval_micro_batches, num_samples = _plan_length(settings, batches, counters, mesh)
    with errors_on_all_ranks():
        datasets = build_data(settings, tokenizer, described, num_samples)
        if resumed is not None:
            _print_notes(check_same_data(settings, resumed, datasets))
            resume_streams(datasets, {} if settings.checkpoint.override_data else resumed, counters, mesh)
            if not settings.checkpoint.override_data:
                remedy = "Give that one, or --override-data"
                check_same_tokenizer(str(checkpoint), resumed.get("tokenizer"), described, remedy)
        tasks = load_tasks(training)
        schedule = None
        if not training.skip_train:
            schedule = Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)
            if resumed is not None and resumed["schedule"] is not None:
                schedule = resume_schedule(
                    schedule,
                    resumed["schedule"],
                    override=settings.schedule.override_opt_param_scheduler,
                    use_checkpoint=settings.schedule.use_checkpoint_opt_param_scheduler,
                )
    check_same_data_on_all_ranks(datasets)
    length = (train_iters, num_eval_micro_batches)
    vocabulary = (vocab_size, unpadded and vocab_size == (meta or found)["model_config"]["vocab_size"])
    return RunPlan(
        checkpoint, meta, base, counters, batches, *length, *vocabulary, described, datasets, tasks, schedule
    )


def build_trainer(
    architecture: Architecture,
    settings: ResolvedSettings,
    device: torch.device,
    loss_class: type[LanguageModelLoss] = LanguageModelLoss,
) -> Trainer:
    """Build, on all ranks together, and load the checkpoint of ``--load`` if there is one."""
    if settings.zero.recipe == AUTO:
        raise ValueError("--zeropp auto is decided by the training program, before a run is built: name a recipe here")
    check_machine(settings, device)
    prepare_products(device)
    training, save = settings.training, settings.checkpoint.save
    with errors_on_all_ranks():
        lock = None
        if save is not None and dist.get_rank() == 0:
            try:
                lock = FolderLock(save)
            except OSError as error:
                raise CheckpointError(f"--save {save} cannot be written: {error}") from error
    mesh = build_mesh(settings, device)
    plan = plan_run(architecture, settings, mesh)
    with errors_on_all_ranks():
        writers = _build_writers(architecture, settings, plan)

    token_traffic = Traffic()
    builder = ModelBuilder(architecture, settings, plan.vocab_size, device, mesh, token_traffic, loss_class)
    model = builder.build()
    zeropp = builder.zeropp
    with errors_on_all_ranks():
        optimizer = build_optimizer(model, settings.optimizer, zeropp)
    trainer = Trainer(
        architecture=architecture,
        settings=settings,
        device=device,
        mesh=mesh,
        model=model,
        pipeline=builder.pipeline,
        optimizer=optimizer,
        scaler=LossScaler(settings.precision),
        zeropp=zeropp,
        islands=OuterSync(model, optimizer, settings.island, mesh.island.get_group(), zeropp),
        loss=builder.loss,
        token_traffic=token_traffic,
        plan=plan,
        writers=writers,
        lock=lock,
    )
    # From here on only dropout draws random numbers. The ranks of a tensor-parallel group must draw the same for the
    # activations that all of them hold; with sequence parallelism each has its own part of the sequence.
    group_size = 1 if settings.distributed.sequence_parallel else mesh.tp_size
    torch.manual_seed(training.seed + dist.get_rank() // group_size)
    if plan.base is not None:
        load_base(plan.base, read_meta(plan.base), model)
        print_once(f"  loaded the frozen weights of {plan.base}")
    if plan.checkpoint is not None and plan.meta is not None:
        _load(trainer, plan.checkpoint, plan.meta)
    elif settings.checkpoint.load is not None:
        print_once(describe_empty(settings.checkpoint.load))
    return trainer


def build_mesh(settings: ResolvedSettings, device: torch.device) -> Mesh:
    ranks = settings.distributed
    replicas = ranks.num_distributed_optimizer_instances
    if settings.zero.zero_stage == 0:
        # Shards of one rank each, that is plain data parallelism with FSDP2's mixed precision.
        replicas = dist.get_world_size() * ranks.context_parallel_size // ranks_per_model_copy(ranks)
    sizes = {axis: getattr(ranks, setting) for axis, setting in AXES.items() if setting is not None}
    return Mesh(device.type, sizes, replicas, ranks.expert_model_parallel_size)


def _plan_length(
    settings: ResolvedSettings, batches: BatchSchedule, counters: Counters, mesh: Mesh
) -> tuple[int, int, tuple[int, int, int]]:
    """Plan the iterations to train, a rank's micro-batches of an evaluation, and all ranks' samples of each split."""
    training = settings.training
    train_iters = training.train_iters
    if train_iters is None:  # the batch size may differ from that before the checkpoint
        to_come = batches.total_iterations(training.train_samples or 0, counters.consumed_train_samples)
        train_iters = counters.iteration + to_come
    if counters.iteration >= train_iters and not training.skip_train:
        _print_notes([f"nothing is left to train after iteration {counters.iteration}: the end of the run is reached"])
    train_samples = batches.samples_after(max(0, train_iters - counters.iteration), counters.consumed_train_samples)
    per_batch = batches.num_micro_batches(train_samples)
    num_eval_micro_batches = training.eval_iters * per_batch
    eval_samples = num_eval_micro_batches * training.micro_batch_size * mesh.dp_size
    evaluations = 1  # at the end of the run
    if training.eval_interval:
        evaluations += max(0, train_iters // training.eval_interval - counters.iteration // training.eval_interval)
    num_samples = (
        0 if training.skip_train else max(train_samples, training.train_samples or 0),
        # Without evaluations 0 even if a checkpoint counts some: 0 samples build no data to evaluate on.
        counters.consumed_valid_samples + evaluations * eval_samples if eval_samples else 0,
        eval_samples,
    )
    return train_iters, num_eval_micro_batches, num_samples


def _build_writers(architecture: Architecture, settings: ResolvedSettings, plan: RunPlan) -> MetricWriters:
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    start = RunStart(
        settings.logging,
        settings.run_folder,
        settings=settings.as_flat_dict(),
        changed={flag.setting: value for flag, value in changed_settings(settings)},
        program={
            "architecture": architecture.name,
            "padded_vocab_size": plan.vocab_size,
            "world_size": dist.get_world_size(),
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "num_parameters": architecture.num_parameters(architecture.build_config(settings.model, plan.vocab_size)),
            **(describe_program() if is_last_rank else {}),
        },
        iteration=None if settings.training.skip_train else plan.counters.iteration,
        resumes=plan.meta is not None and not settings.checkpoint.finetune and goes_on_in(settings.checkpoint),
    )
    return MetricWriters(start, is_writer=is_last_rank)


def _load(trainer: Trainer, checkpoint: Path, meta: dict[str, Any]) -> None:
    """Fill the run from a checkpoint; with --finetune the model alone."""
    settings, goes_on = trainer.settings.checkpoint, not trainer.settings.checkpoint.finetune
    if goes_on and trainer.zeropp is not None:  # state of its own overrides this
        trainer.zeropp.set_optimizer_steps(trainer.counters.iteration - trainer.counters.skipped_iterations)
    rows, plan, new_rows = num_tokens(meta), trainer.plan, None
    if not goes_on and (plan.tokenizer["vocab_size"] > rows or plan.vocab_size != meta["model_config"]["vocab_size"]):
        new_rows = (rows, settings.new_token_init)
        how = "are random" if settings.new_token_init == "random" else "begin as their mean"
        print_once(f"note: {rows:,} rows of the vocabulary are the checkpoint's, and others {how} (--new-token-init)")
    loaded = load_checkpoint(
        checkpoint,
        meta,
        trainer,
        trainer.layout(),
        with_optimizer=goes_on and not settings.no_load_optim,
        load_rng=goes_on and not settings.no_load_rng,
        new_rows=new_rows,
    )
    if goes_on:
        trainer.scaler.load_state_dict(meta.get("loss_scalers", [meta["loss_scaler"]])[loaded.copy_number])
    _print_notes(loaded.notes)
    print_once(f"  successfully loaded checkpoint {checkpoint} at iteration {meta['iteration']}")


def _check_same_model(
    architecture: Architecture,
    settings: ResolvedSettings,
    checkpoint: Path,
    meta: dict[str, Any],
    config: TransformerConfig,
    *,
    finetunes: bool,
    has_adapters: bool = True,
) -> list[str]:
    """Raise CheckpointError if the checkpoint's model has another shape or uses its weights otherwise.

    config: of the run's model. What fine-tuning, or --override-model, may change is returned, as a note.
    """
    _, saved = saved_model(meta, architecture, with_adapters=True)
    theirs, sizes = dataclasses.asdict(saved), {field.name for field in dataclasses.fields(ShapeSettings)}
    differing = {
        name: f"{there} there, {here} here"
        for k, v in sorted(dataclasses.asdict(config).items(), key=lambda item: item[0] not in sizes)
        if theirs[k] != v and not k.endswith("dropout") and k != "init_method_std"
        for name, there, here in _parts(k, theirs[k], v)
    }
    override = {FIELDS.get(setting_of(word), setting_of(word)) for word in settings.checkpoint.override_model or ()}
    if unknown := override - CHANGEABLE:
        choices = ", ".join(sorted(CHANGEABLE))
        raise CheckpointError(f"--override-model {' '.join(sorted(unknown))}: a resume may change only {choices}")
    only = {"position_embedding_type": "rope there, yarn here"}
    can_change = {name for name, text in differing.items() if name in CHANGEABLE and text == only.get(name, text)}
    may_change = can_change if finetunes else can_change & override
    if finetunes and has_adapters and num_tokens(meta) <= config.vocab_size:  # a base stays as it was
        may_change = may_change | {"vocab_size"}
    changed = [f"{name} {differing.pop(name)}" for name in list(differing) if name in may_change]
    for name in ("lora_rank", "lora_alpha") if has_adapters else ():  # a base may have none
        there, here = meta["settings"].get(name, getattr(LoraSettings, name)), getattr(settings.lora, name)
        differing |= {name: f"{there} there, {here} here"} if there != here else {}
    if differing:
        other = f"{checkpoint} is of another model: {'; '.join(f'{name} {text}' for name, text in differing.items())}"
        more = f", or --override-model {' '.join(differing)}" if differing.keys() <= can_change else ""
        raise CheckpointError(f"{other}. Give the flags of the model that was saved, or --load another folder{more}")
    by = "fine-tuning" if finetunes else "--override-model"
    return [f"{by} changes the model: {'; '.join(changed)}"] if changed else []


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print_once(f"note: {note}")


def _parts(name: str, there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """Return what differs of a config's field: itself, or of a config within it its fields, as ``moe.router_topk``."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        there, here = ("set" if isinstance(value, dict) else value for value in (there, here))
        return [(name, there, here)]
    return [(f"{name}.{part}", there.get(part), value) for part, value in here.items() if there.get(part) != value]
