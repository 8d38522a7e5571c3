"""Builds everything that a run needs from its settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.data.build import Datasets, build_datasets
from megatron_zpp.data.tokenizers import build_tokenizer
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.gpt import GPT
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.llama import Llama
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.sharding import shard_model
from megatron_zpp.training.batch_size import BatchSchedule
from megatron_zpp.training.checkpoint import CheckpointError, find_checkpoint, load_checkpoint, read_meta
from megatron_zpp.training.logging import MetricWriters, progress
from megatron_zpp.training.loss_scaler import LossScaler
from megatron_zpp.training.model import build_model, mixed_precision
from megatron_zpp.training.optimizer import build_optimizer
from megatron_zpp.training.resolve import zeropp_config
from megatron_zpp.training.schedule import Schedule, resume_schedule
from megatron_zpp.training.settings import CheckpointSettings, Settings
from megatron_zpp.zeropp import ZeroPP, apply_zeropp


@dataclass
class Counters:
    """How far a run is; a checkpoint keeps it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # as the learning-rate schedule counts: skipped steps left out
    skipped_iterations: int = 0
    nan_iterations: int = 0


@dataclass
class Run:
    """The parts of a run."""

    settings: Settings
    device: torch.device
    model: GPT | Llama
    optimizer: torch.optim.Optimizer
    zeropp: ZeroPP | None  # None at ZeRO stage 0, which has no sharded collectives
    schedule: Schedule | None  # None with --skip-train
    batches: BatchSchedule
    scaler: LossScaler
    datasets: Datasets
    writers: MetricWriters
    train_iters: int
    num_eval_micro_batches: int  # per rank and evaluation
    counters: Counters

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors."""
        return {
            "settings": self.settings.as_flat_dict(),
            "model_config": dataclasses.asdict(self.model.config),
            "counters": dataclasses.asdict(self.counters),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaler": self.scaler.state_dict(),
        }


def build_run(settings: Settings, device: torch.device) -> Run:
    """Build, on all ranks together, and load the checkpoint of ``--load`` if there is one."""
    training = settings.training
    assert training.global_batch_size and training.micro_batch_size and training.seq_length  # by parse_settings
    batches = BatchSchedule(
        training.global_batch_size,
        training.micro_batch_size,
        dist.get_world_size(),
        training.rampup_batch_size,
        training.decrease_batch_size_if_needed,
    )
    train_iters = training.train_iters
    if train_iters is None:
        train_iters = batches.total_iterations(training.train_samples or 0)
    with errors_on_all_ranks():
        checkpoint = _find_checkpoint(settings.checkpoint)
        meta = read_meta(checkpoint) if checkpoint is not None else None
        counters = Counters()
        if meta is not None and not settings.checkpoint.finetune:
            counters = Counters(**meta["counters"])
    samples = _samples_at_end(batches, counters, train_iters)
    num_eval_micro_batches = training.eval_iters * batches.num_micro_batches(samples)
    with errors_on_all_ranks(), progress("building data"):
        if settings.checkpoint.save is not None:
            Path(settings.checkpoint.save).mkdir(parents=True, exist_ok=True)
        eval_samples = num_eval_micro_batches * training.micro_batch_size * dist.get_world_size()
        vocab_size, datasets = _build_data(settings, counters, train_iters, samples, eval_samples)
        run_config = settings.as_flat_dict() | {"world_size": dist.get_world_size()}
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        writers = MetricWriters(settings.logging, run_config, is_writer=is_last_rank, save=settings.checkpoint.save)
        schedule = None
        if not training.skip_train:
            schedule = Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)

    model, zeropp = _build_model(settings, vocab_size, device)
    with errors_on_all_ranks():
        optimizer = build_optimizer(model, settings.optimizer)
    run = Run(
        settings,
        device,
        model,
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
    )
    torch.manual_seed(training.seed + dist.get_rank())  # from here on randomness is dropout's: its own on each rank
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
    if settings.load is None:
        return None
    checkpoint = find_checkpoint(settings.load, settings.ckpt_step)
    if checkpoint is None and settings.exit_on_missing_checkpoint:
        raise CheckpointError(f"{settings.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    return checkpoint


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
        names.tokenizer_type, names.tokenizer_model, names.vocab_file, names.merge_file, names.vocab_size
    )
    evaluations_to_come = 1
    if training.eval_interval:
        evaluations_to_come += train_iters // training.eval_interval - counters.iteration // training.eval_interval
    valid_samples = counters.consumed_valid_samples + max(1, evaluations_to_come) * eval_samples
    datasets = build_datasets(
        data_path=data.data_path,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        split=data.split,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples=(0 if training.skip_train else train_samples, valid_samples, eval_samples),
        vocab_size=tokenizer.vocab_size,
        cache_path=data.data_cache_path,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        mock_data=data.mock_data,
    )
    return tokenizer.vocab_size, datasets


def _build_model(settings: Settings, vocab_size: int, device: torch.device) -> tuple[GPT | Llama, ZeroPP | None]:
    """The model, sharded before it has storage, so that it never exists whole on one rank."""
    model = build_model(settings.architecture, settings.model, vocab_size)
    activation, zero = settings.activation, settings.zero
    if activation.recompute_granularity is not None:
        apply_activation_checkpointing(
            model, activation.recompute_granularity, activation.recompute_method, activation.recompute_num_layers
        )
    if activation.compile:
        for block in model.layers:
            block.forward = torch.compile(block.forward)
    shard_model(model, device, dist.get_world_size(), zero.zero_stage, mixed_precision(settings.precision))
    zeropp = apply_zeropp(model, zeropp_config(zero)) if zero.zero_stage > 0 else None
    if zeropp is not None:
        zeropp.monitor_errors(zero.zero_monitor_interval)
    model.to_empty(device=device)
    with progress("initializing weights"):
        init_weights(model, settings.training.seed)
    return model, zeropp


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
        run.model,
        None if finetune or settings.checkpoint.no_load_optim else run.optimizer,
        run.zeropp,
        load_rng=not (finetune or settings.checkpoint.no_load_rng),
    )
    if not finetune:
        run.scaler.load_state_dict(meta["loss_scaler"])
    for note in notes:
        print_once(f"note: {note}")
    print_once(f"  successfully loaded checkpoint {checkpoint} at iteration {meta['iteration']}")
