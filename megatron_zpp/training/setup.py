"""Builds everything that a run needs from its settings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.data.build import Datasets, build_datasets
from megatron_zpp.data.fill_in_the_middle import FillInTheMiddle, find_token
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.order import check_order
from megatron_zpp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.gpt import GPT
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.llama import Llama
from megatron_zpp.parallel.context import apply_context_parallel
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.mesh import Mesh, build_mesh
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD, Pipeline
from megatron_zpp.parallel.sharding import shard_model
from megatron_zpp.parallel.stages import join_stages, keep_stage
from megatron_zpp.parallel.tensor import apply_tensor_parallelism, dropout_seed
from megatron_zpp.training.batch_size import BatchSchedule
from megatron_zpp.training.checkpoint import (
    CheckpointError,
    FolderLock,
    find_checkpoint,
    latest_good,
    load_checkpoint,
    problems_on_all_ranks,
    read_meta,
)
from megatron_zpp.training.logging import MetricWriters, progress
from megatron_zpp.training.loss_scaler import LossScaler
from megatron_zpp.training.model import build_model, mixed_precision, padded_vocab_size
from megatron_zpp.training.optimizer import build_optimizer
from megatron_zpp.training.resolve_parallel import check_vocabulary, placement_of
from megatron_zpp.training.resolve_zero import zeropp_config
from megatron_zpp.training.schedule import Schedule, resume_schedule
from megatron_zpp.training.settings import CheckpointSettings, DataSettings, Settings
from megatron_zpp.zeropp import EmulatedZeroPP, ZeroPP, apply_zeropp, emulate_zeropp
from megatron_zpp.zeropp.topology import gather_node_names


@dataclass
class Counters:
    """How far a run is; a checkpoint keeps it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # as the learning-rate schedule counts: skipped steps left out
    skipped_iterations: int = 0
    nan_iterations: int = 0
    average_loss: float = 0.0  # of the steps so far, moving; 0 = not asked for; see is_loss_spike


@dataclass
class Run:
    """The parts of a run."""

    settings: Settings
    device: torch.device
    mesh: Mesh
    model: GPT | Llama  # this rank's part of it
    pipeline: Pipeline | None  # None with one stage
    optimizer: torch.optim.Optimizer
    zeropp: ZeroPP | EmulatedZeroPP | None  # None at ZeRO stage 0, which has no sharded collectives
    schedule: Schedule | None  # None with --skip-train
    batches: BatchSchedule
    scaler: LossScaler
    datasets: Datasets
    writers: MetricWriters
    train_iters: int
    num_eval_micro_batches: int  # per data-parallel rank and evaluation
    counters: Counters
    lock: FolderLock | None = None  # on --save, held by rank 0
    last_loss: float | None = None

    def set_training(self, mode: bool) -> None:
        """Training mode, or evaluation mode."""
        (self.model if self.pipeline is None else self.pipeline).train(mode)

    def norm_scope(self) -> tuple[dist.ProcessGroup | None, Sequence[Tensor]]:
        """What ``clip_gradients`` has to know of a pipeline: its group, and parameters that are counted elsewhere."""
        return (None, ()) if self.pipeline is None else (self.pipeline.group, self.pipeline.copies)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors."""
        return {
            "settings": self.settings.as_flat_dict(),
            "model_config": dataclasses.asdict(self.model.config),
            "counters": dataclasses.asdict(self.counters),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaler": self.scaler.state_dict(),
            "loss": self.last_loss if self.last_loss is not None and math.isfinite(self.last_loss) else None,
            "data_order": self.datasets.train.order if self.datasets.train is not None else None,
            "tokens": self.counters.consumed_train_samples * (self.settings.training.seq_length or 0),
            "layout": self.layout(),
        }

    def layout(self) -> dict[str, int | str]:
        """How the ranks are divided, and whether those of a tensor-parallel group draw random numbers alike."""
        mesh = self.mesh
        sizes: dict[str, int | str] = {"pp": mesh.pp_size, "dp": mesh.dp_size, "cp": mesh.cp_size, "tp": mesh.tp_size}
        if self.pipeline is not None:
            sizes["stages"] = str(self.pipeline.placement)
        return sizes | {"sp": int(self.settings.distributed.sequence_parallel and self.mesh.tp_size > 1)}


def build_run(settings: Settings, device: torch.device) -> Run:
    """Build, on all ranks together, and load the checkpoint of ``--load`` if there is one."""
    training, ranks = settings.training, settings.distributed
    assert training.global_batch_size and training.micro_batch_size and training.seq_length  # by parse_settings
    mesh = build_mesh(
        device.type,
        tp_size=ranks.tensor_model_parallel_size,
        pp_size=ranks.pipeline_model_parallel_size,
        cp_size=ranks.context_parallel_size,
        emulated_ranks=ranks.emulate_ranks or 1,
    )
    batches = BatchSchedule(
        training.global_batch_size,
        training.micro_batch_size,
        mesh.dp_size,
        training.rampup_batch_size,
        training.decrease_batch_size_if_needed,
    )
    with errors_on_all_ranks():
        lock = None
        if settings.checkpoint.save is not None and dist.get_rank() == 0:
            lock = FolderLock(settings.checkpoint.save)
    checkpoint = _find_checkpoint(settings.checkpoint)
    with errors_on_all_ranks():
        meta = read_meta(checkpoint) if checkpoint is not None else None
        counters = Counters()
        if meta is not None and not settings.checkpoint.finetune:
            counters = _saved_counters(meta)
            _check_same_batches_and_data(settings, meta)
    train_iters = training.train_iters
    if train_iters is None:  # the batch size may be another than before the checkpoint
        to_come = batches.total_iterations(training.train_samples or 0, counters.consumed_train_samples)
        train_iters = counters.iteration + to_come
    samples = _samples_at_end(batches, counters, train_iters)
    num_eval_micro_batches = training.eval_iters * batches.num_micro_batches(samples)
    with errors_on_all_ranks():
        eval_samples = num_eval_micro_batches * training.micro_batch_size * mesh.dp_size
        samples = max(samples, training.train_samples or 0)
        vocab_size, datasets = _build_data(settings, counters, train_iters, samples, eval_samples)
        multiple = settings.model.make_vocab_size_divisible_by
        check_vocabulary(ranks, padded_vocab_size(vocab_size, multiple), multiple)
        if meta is not None and not settings.checkpoint.finetune:
            _check_same_order(settings, meta, datasets)
        run_config = settings.as_flat_dict() | {"world_size": dist.get_world_size()}
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        writers = MetricWriters(settings.logging, run_config, is_writer=is_last_rank, save=settings.checkpoint.save)
        schedule = None
        if not training.skip_train:
            schedule = Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)

    _check_same_data_on_all_ranks(datasets)
    model, pipeline, zeropp = _build_model(settings, vocab_size, device, mesh)
    with errors_on_all_ranks():
        optimizer = build_optimizer(model, settings.optimizer)
        if isinstance(zeropp, EmulatedZeroPP):
            zeropp.step_by_shards(optimizer)
    run = Run(
        settings,
        device,
        mesh,
        model,
        pipeline,
        optimizer,
        zeropp,
        schedule,
        batches,
        LossScaler.from_settings(settings.precision),
        datasets,
        writers,
        train_iters,
        num_eval_micro_batches,
        counters,
        lock,
    )
    # From here on randomness is dropout's.
    torch.manual_seed(dropout_seed(training.seed, dist.get_rank(), mesh.tp_size, ranks.sequence_parallel))
    if isinstance(zeropp, EmulatedZeroPP):
        zeropp.random_states.seed(training.seed)
    if checkpoint is not None and meta is not None:
        _load(run, checkpoint, meta)
    elif settings.checkpoint.load is not None:
        print_once(f"no checkpoint in {settings.checkpoint.load} yet: starting from scratch")
    return run


def print_once(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _find_checkpoint(settings: CheckpointSettings) -> Path | None:
    """The checkpoint to load, the same on every rank, verified as the settings ask; None to start from scratch."""
    if settings.load is None:
        return None
    if settings.load_latest_good:
        with progress("verifying checkpoints"):
            checkpoint, passed_over = latest_good(settings.load, settings.verify_checkpoint)
        for problem in passed_over:
            print_once(f"note: damaged, passed over: {problem}")
        with errors_on_all_ranks():
            if checkpoint is None and passed_over:
                raise CheckpointError(f"{settings.load} holds no good checkpoint: {'; '.join(passed_over)}")
            if checkpoint is None and dist.get_rank() == 0:
                find_checkpoint(settings.load)  # raises if this is no place for checkpoints
    else:
        found: list[Path | None] = [None]
        with errors_on_all_ranks():
            if dist.get_rank() == 0:  # alone: ranks that look at different moments may see different ones
                found = [find_checkpoint(settings.load, settings.ckpt_step)]
        dist.broadcast_object_list(found)
        checkpoint = found[0]
        if checkpoint is not None:
            with progress("verifying the checkpoint"):
                wrong = problems_on_all_ranks(checkpoint, settings.verify_checkpoint)
            with errors_on_all_ranks():
                if wrong:
                    raise CheckpointError(
                        f"{checkpoint} is damaged: {'; '.join(wrong)}. Load another one with --ckpt-step, or the "
                        "newest good one with --load-latest-good"
                    )
    with errors_on_all_ranks():
        if checkpoint is None and settings.exit_on_missing_checkpoint:
            raise CheckpointError(f"{settings.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    return checkpoint


def _saved_counters(meta: Mapping[str, Any]) -> Counters:
    try:
        return Counters(**meta["counters"])
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's counters are of another version of megatron_zpp ({error})") from error


_BATCH_SETTINGS = ("global_batch_size", "rampup_batch_size", "decrease_batch_size_if_needed", "seq_length", "seed")
# On what is read in which order; of data_order_stable and the surplus, check_order knows where they have some.
_WITHOUT_INFLUENCE = (
    "num_workers",
    "data_cache_path",
    "no_mmap_bin_files",
    "pad_last_valid_sample",
    "data_order_stable",
    "mid_level_dataset_surplus",
)


def _check_same_batches_and_data(settings: Settings, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError where going on would read other data, or in other batches, than the run did so far."""
    if settings.schedule.override_opt_param_scheduler:
        return
    ours, saved = json.loads(json.dumps(settings.as_flat_dict())), meta["settings"]
    of_data = [field.name for field in dataclasses.fields(settings.data) if field.name not in _WITHOUT_INFLUENCE]
    differing = []
    for name in (*_BATCH_SETTINGS, *of_data, "tokenizer_type"):
        here, there = ours[name], saved.get(name, ours[name])
        if name.endswith("_path"):  # the files may have moved to another folder
            here, there = (_file_names(value) for value in (here, there))
        if here != there:
            differing.append(f"{name} {there} there, {here} here")
    if differing:
        raise CheckpointError(
            f"batches or data are not the checkpoint's: {'; '.join(differing)}. Give what was given before, or "
            "--override-opt_param-scheduler to go on with these"
        )


def _file_names(paths: str | list[str] | None) -> list[str]:
    return [Path(path).name for path in ([paths] if isinstance(paths, str) else paths or ())]


def _samples_at_end(batches: BatchSchedule, counters: Counters, train_iters: int) -> int:
    """Training samples that will have been consumed; the batch size may be another than before the checkpoint."""
    samples = counters.consumed_train_samples
    for _ in range(counters.iteration, train_iters):
        samples += batches.global_batch_size(samples)
    return samples


def _build_data(
    settings: Settings, counters: Counters, train_iters: int, train_samples: int, eval_samples: int
) -> tuple[int, Datasets]:
    """The vocabulary's size and the datasets. train_samples: of the whole run; eval_samples: of one evaluation."""
    training, data, names = settings.training, settings.data, settings.tokenizer
    assert training.seq_length and names.tokenizer_type
    tokenizer = build_tokenizer(
        names.tokenizer_type,
        names.tokenizer_model,
        names.vocab_file,
        names.merge_file,
        names.vocab_size,
        names.tiktoken_pattern,
    )
    evaluations_to_come = 1
    if training.eval_interval:
        evaluations_to_come += train_iters // training.eval_interval - counters.iteration // training.eval_interval
    valid_samples = counters.consumed_valid_samples + max(1, evaluations_to_come) * eval_samples
    options = SampleOptions(
        seq_length=training.seq_length,
        seed=training.seed,
        stable_order=data.data_order_stable,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        fill_in_the_middle=_fill_in_the_middle(data, tokenizer) if data.fim_data else None,
    )
    datasets = build_datasets(
        options,
        data_path=data.data_path,
        data_args_path=data.data_args_path,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        per_split_data_args_path=data.per_split_data_args_path,
        split=data.split,
        mock_data=data.mock_data,
        num_samples=(0 if training.skip_train else train_samples, valid_samples, eval_samples),
        vocab_size=tokenizer.vocab_size,
        cache_path=data.data_cache_path,
        surplus=data.mid_level_dataset_surplus,
        keep_last_valid=data.pad_last_valid_sample,
        mmap_tokens=not data.no_mmap_bin_files,
        # The rank that builds shows it: the others of its node wait for it.
        progress=partial(progress, any_rank=True, line_every=10.0),
    )
    return tokenizer.vocab_size, datasets


def _fill_in_the_middle(data: DataSettings, tokenizer: Tokenizer) -> FillInTheMiddle:
    names = (data.fim_prefix_token, data.fim_middle_token, data.fim_suffix_token)
    prefix, middle, suffix = (find_token(tokenizer, name) for name in names)
    return FillInTheMiddle(prefix, middle, suffix, data.fim_rate, data.fim_spm_rate)


def _check_same_order(settings: Settings, meta: Mapping[str, Any], datasets: Datasets) -> None:
    saved = meta.get("data_order")
    if datasets.train is not None and saved is not None:
        check_order(saved, datasets.train.order, other_data=settings.schedule.override_opt_param_scheduler)


def _check_same_data_on_all_ranks(datasets: Datasets) -> None:
    """Each node reads its own copy of the data: refuse copies that differ."""
    ours = json.dumps([split.order for split in datasets if split is not None])
    orders: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, ours)
    with errors_on_all_ranks():
        others = [rank for rank, order in enumerate(orders) if order != orders[0]]
        if others:
            raise ValueError(
                f"ranks {', '.join(map(str, others))} read other data than rank 0: the files differ between nodes; "
                "copy the .bin and .idx files of one node to all"
            )


def _build_model(
    settings: Settings, vocab_size: int, device: torch.device, mesh: Mesh
) -> tuple[GPT | Llama, Pipeline | None, ZeroPP | EmulatedZeroPP | None]:
    """The model, sharded before it has storage, so that it never exists whole on one rank; whole if it emulates."""
    zero, ranks, precision = settings.zero, settings.distributed, mixed_precision(settings.precision)
    _check_nodes_alike(settings, mesh)
    build = partial(_build_whole, settings, vocab_size, mesh)
    pipeline: Pipeline | None = None
    zeropp: ZeroPP | EmulatedZeroPP | None = None
    if mesh.pp_size > 1:
        model, pipeline, zeropp = _build_stages(settings, build, device, mesh)
    else:
        model = build()
        _prepare_model(model, settings)
        if ranks.emulate_ranks is None:
            shard_model(model, mesh, zero.zero_stage, precision)
            if zero.zero_stage > 0:
                zeropp = apply_zeropp(model, zeropp_config(zero), tensor_parallel=mesh.tensor_parallel_group())
        model.to_empty(device=device)
    with progress("initializing weights"):
        init_weights(model, settings.training.seed)
    if ranks.emulate_ranks is not None:
        zeropp = emulate_zeropp(
            model,
            zeropp_config(zero),
            ranks.emulate_nodes,
            ranks.emulate_ranks // ranks.emulate_nodes,
            units=list(model.layers),
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            zero_stage=zero.zero_stage,
        )
    if zeropp is not None:
        zeropp.monitor_errors(zero.zero_monitor_interval)
    return model, pipeline, zeropp


def _check_nodes_alike(settings: Settings, mesh: Mesh) -> None:
    """Refuse data-parallel groups that are split over nodes in different ways, each of which would be fine alone."""
    zero = settings.zero
    if mesh.pp_size * mesh.tp_size == 1 or zero.zero_ranks_per_node is not None or zero.zero_hpz_partition_size > 1:
        return
    names = gather_node_names(mesh.fsdp.get_group())
    mine = [names.count(name) for name in dict.fromkeys(names)]  # ranks on each node
    of_all: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    with errors_on_all_ranks():
        others = next((ranks for ranks in of_all if ranks != of_all[0]), None)
        if others is not None:
            raise ValueError(
                f"some data-parallel groups have {of_all[0]} ranks on their nodes, others {others}: choose "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size so that all are alike, or give "
                "--zero-ranks-per-node"
            )


def _build_whole(settings: Settings, vocab_size: int, mesh: Mesh) -> GPT | Llama:
    """The whole model on the meta device, as the context- and tensor-parallel ranks have it."""
    model = build_model(settings.architecture, settings.model, vocab_size)
    if mesh.cp_size > 1:
        apply_context_parallel(model, mesh.grid["cp"])
    if mesh.tp_size > 1:
        apply_tensor_parallelism(model, mesh, settings.distributed.sequence_parallel)
    return model


def _prepare_model(model: GPT | Llama, settings: Settings) -> None:
    """What is done to a model, or to one stage of it, before it is sharded."""
    activation = settings.activation
    if activation.recompute_granularity is not None:
        apply_activation_checkpointing(
            model, activation.recompute_granularity, activation.recompute_method, activation.recompute_num_layers
        )
    if activation.compile:
        for block in model.layers:
            block.forward = torch.compile(block.forward)


def _build_stages(
    settings: Settings, build: Callable[[], GPT | Llama], device: torch.device, mesh: Mesh
) -> tuple[GPT | Llama, Pipeline, ZeroPP]:
    """This rank's stages, cut out of the model that ``build`` makes: as one model, and as a pipeline."""
    training, model, precision = settings.training, build(), mixed_precision(settings.precision)
    config = model.config
    schedule = settings.distributed.pipeline_schedule
    assert training.micro_batch_size and training.seq_length and schedule
    # Where FSDP2's hooks cannot follow the backward pass, a step gathers parameters once and reduces gradients once.
    zero_stage = 1 if schedule in SPLITS_BACKWARD else settings.zero.zero_stage
    placement = placement_of(settings.distributed, config.num_layers)
    stages = {number: build() for number in placement.stages_of(mesh.pp_rank)}
    for number, stage in stages.items():
        keep_stage(stage, placement, number)
        _prepare_model(stage, settings)
        shard_model(stage, mesh, zero_stage, precision)
    units = nn.ModuleDict({f"stage{number}": stage for number, stage in stages.items()})
    zeropp = apply_zeropp(
        units, zeropp_config(settings.zero), mesh.grid["pp"].get_group(), mesh.tensor_parallel_group()
    )
    for stage in stages.values():
        stage.to_empty(device=device)
    length = training.seq_length // mesh.cp_size
    tokens = torch.empty((training.micro_batch_size, length), dtype=torch.int64, device="meta")
    length //= mesh.tp_size if settings.distributed.sequence_parallel else 1
    hidden = torch.empty(
        (training.micro_batch_size, length, config.hidden_size),
        dtype=precision.param_dtype or torch.float32,
        device="meta",
        requires_grad=True,
    )
    pipeline = Pipeline(
        stages, placement, mesh, schedule, tokens, hidden, zero_stage, zeropp, tied_embeddings=config.tie_embeddings
    )
    return join_stages(model, stages), pipeline, zeropp


def _load(run: Run, checkpoint: Path, meta: dict[str, Any]) -> None:
    settings = run.settings
    with errors_on_all_ranks():
        ours = dataclasses.asdict(run.model.config)
        differing = [
            f"{k} {meta['model_config'].get(k)} there, {v} here"
            for k, v in ours.items()
            if meta["model_config"].get(k) != v and not k.endswith("dropout") and k != "init_method_std"
        ]
        if differing:
            raise CheckpointError(f"{checkpoint} is of another model: {'; '.join(differing)}")
        if not settings.checkpoint.finetune and run.schedule is not None and meta["schedule"] is not None:
            run.schedule = resume_schedule(
                run.schedule,
                meta["schedule"],
                override=settings.schedule.override_opt_param_scheduler,
                use_checkpoint=settings.schedule.use_checkpoint_opt_param_scheduler,
            )
    finetune = settings.checkpoint.finetune
    notes = load_checkpoint(
        checkpoint,
        meta,
        run.model,
        None if finetune or settings.checkpoint.no_load_optim else run.optimizer,
        run.zeropp,
        run.layout(),
        load_rng=not (finetune or settings.checkpoint.no_load_rng),
    )
    if not finetune:
        run.scaler.load_state_dict(meta["loss_scaler"])
    for note in notes:
        print_once(f"note: {note}")
    print_once(f"  successfully loaded checkpoint {checkpoint} at iteration {meta['iteration']}")
