"""The training program: everything that happens in a run, in the order in which it happens."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime

import torch
import torch.distributed as dist

from megatron_zpp.data.build import Batch, build_loader
from megatron_zpp.models.flops import num_parameters
from megatron_zpp.parallel.distributed import FailedTogether, errors_on_all_ranks, init_distributed, report_error
from megatron_zpp.training.arguments import SettingsError, parse_settings
from megatron_zpp.training.checkpoint import save_checkpoint
from megatron_zpp.training.evaluate import evaluate
from megatron_zpp.training.logging import format_validation_lines, progress, validation_metrics
from megatron_zpp.training.report import Reporter
from megatron_zpp.training.settings import DistributedSettings
from megatron_zpp.training.setup import Run, build_run, print_once
from megatron_zpp.training.step import train_step

EXIT_USER_ERROR = 2
MAX_SKIPPED_IN_A_ROW = 50  # fp16's first loss scale, 2^32, may take 30 halvings to come down


def pretrain(architecture: str) -> None:
    """Run what the command line says for a "gpt" or "llama"; ends the process with status 2 after a user's error."""
    start = time.monotonic()
    try:
        settings, mistake, ranks = None, None, DistributedSettings()
        try:
            settings = parse_settings(architecture, world_size=int(os.environ.get("WORLD_SIZE", "1")))
            ranks = settings.distributed
        except SettingsError as error:
            mistake = error
        # The ranks meet to report a mistake too: torchrun ends them all when the first one leaves.
        device = init_distributed(ranks.distributed_backend, ranks.distributed_timeout_minutes)
        with errors_on_all_ranks():
            if mistake is not None:
                raise mistake
        assert settings is not None
        run = build_run(settings, device)
        _describe(run)
        train(run, start)
        run.writers.close()
    except FailedTogether:
        sys.exit(EXIT_USER_ERROR)
    except (ValueError, OSError, ImportError) as error:
        _report_alone_or_together(error)
        sys.exit(EXIT_USER_ERROR)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(run: Run, start: float) -> None:
    """The loop: step, log, evaluate, save, until the last iteration or a wish to stop. ``start``: monotonic seconds."""
    settings, counters = run.settings, run.counters
    training, checkpoint = settings.training, settings.checkpoint
    stop_signals = _catch_sigterm() if training.exit_signal_handler else []
    has_dynamic_scale = settings.precision.fp16 and settings.precision.loss_scale is None  # which overflows to adapt
    nan_is_an_error = not (training.no_check_for_nan_in_loss_and_grad or has_dynamic_scale)
    valid_batches = _batches(run, "valid", counters.consumed_valid_samples)
    if training.manual_gc:
        gc.disable()

    if not training.skip_train:
        train_batches = _batches(run, "train", counters.consumed_train_samples)
        assert train_batches is not None
        reporter = Reporter(run)
        saved_at, skipped_in_a_row = counters.iteration, 0
        while counters.iteration < run.train_iters:
            num_micro_batches = run.batches.num_micro_batches(counters.consumed_train_samples)
            batch_size = run.batches.global_batch_size(counters.consumed_train_samples)
            out_of_time = training.exit_duration_in_mins is not None and (
                time.monotonic() - start > training.exit_duration_in_mins * 60
            )
            compiles = settings.activation.compile and reporter.is_first_step
            with progress("compiling") if compiles else nullcontext():
                result = train_step(run, train_batches, num_micro_batches, stop=bool(stop_signals) or out_of_time)

            counters.iteration += 1
            counters.consumed_train_samples += batch_size
            counters.scheduled_samples += 0 if result.skipped else batch_size
            counters.skipped_iterations += result.skipped
            counters.nan_iterations += result.loss != result.loss
            reporter.step(result, batch_size)

            iteration = counters.iteration
            if result.skipped and nan_is_an_error:
                raise ValueError(
                    f"NaN or Inf at iteration {iteration}: loss {result.loss:g}, gradient norm {result.grad_norm:g}; "
                    "lower --lr, look at the data, or leave such steps out with --no-check-for-nan-in-loss-and-grad"
                )
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise ValueError(
                    f"the gradients of the last {MAX_SKIPPED_IN_A_ROW} steps were NaN or Inf (loss {result.loss}, loss "
                    f"scale {run.scaler.scale:g}), so the parameters did not move: lower --lr or look at the data"
                )
            if training.eval_interval and iteration % training.eval_interval == 0 and iteration < run.train_iters:
                reporter.pause()
                _validate(run, valid_batches)
                reporter.resume()
            stop = result.stop or (training.exit_interval is not None and iteration % training.exit_interval == 0)
            save_is_due = checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0
            if checkpoint.save is not None and (save_is_due or stop or iteration == run.train_iters):
                reporter.pause()
                _save(run)
                reporter.resume()
                saved_at = iteration
            if training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
                gc.collect()
            if stop and iteration < run.train_iters:
                saved = f", saved in {checkpoint.save}" if saved_at == iteration else ", not saved: there is no --save"
                print_once(f"exiting program at iteration {iteration}{saved}")
                return

    if valid_batches is not None:
        _validate(run, valid_batches, "validation")
    test_batches = _batches(run, "test", 0)
    if test_batches is not None:
        loss = evaluate(run, test_batches, run.num_eval_micro_batches)
        _print_losses(run, loss, "test")


def _describe(run: Run) -> None:
    zeropp, world_size = run.zeropp, dist.get_world_size()
    print_once(
        f"{run.settings.architecture} with {num_parameters(run.model.config):,} parameters, ZeRO stage "
        f"{run.settings.zero.zero_stage} on {world_size} rank{'s' if world_size > 1 else ''} ({run.device.type}, torch "
        f"{torch.__version__})"
    )
    if zeropp is not None and world_size > 1:
        print_once(zeropp.describe())


def _batches(run: Run, split: str, consumed_samples: int) -> Iterator[Batch] | None:
    """This rank's micro-batches of a split from ``consumed_samples`` on; None if the run has no such data."""
    dataset = getattr(run.datasets, split)
    if dataset is None:
        return None
    assert run.settings.training.micro_batch_size
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=run.settings.training.micro_batch_size,
        dp_rank=dist.get_rank(),
        dp_size=dist.get_world_size(),
        num_workers=run.settings.data.num_workers,
        device=run.device,
    )


def _validate(run: Run, batches: Iterator[Batch] | None, data_set: str | None = None) -> None:
    if batches is None:
        return
    assert run.settings.training.micro_batch_size
    loss = evaluate(run, batches, run.num_eval_micro_batches)
    samples = run.num_eval_micro_batches * run.settings.training.micro_batch_size * dist.get_world_size()
    run.counters.consumed_valid_samples += samples
    _print_losses(run, loss, data_set)
    metrics = validation_metrics({"lm loss": loss}, run.settings.logging)
    run.writers.write(metrics, run.counters.iteration, run.counters.consumed_train_samples)


def _print_losses(run: Run, loss: float, data_set: str | None) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(*format_validation_lines(run.counters.iteration, {"lm loss": loss}, data_set), sep="\n", flush=True)


def _save(run: Run) -> None:
    checkpoint, iteration = run.settings.checkpoint, run.counters.iteration
    assert checkpoint.save is not None
    with progress("saving checkpoint"):
        optimizer = None if checkpoint.no_save_optim else run.optimizer
        save_checkpoint(
            checkpoint.save,
            iteration,
            run.model,
            optimizer,
            run.zeropp,
            run.meta(),
            save_rng=not checkpoint.no_save_rng,
        )
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    print_once(f"  [{now}] successfully saved checkpoint from iteration {iteration:7d} to {checkpoint.save}")


def _catch_sigterm() -> list[int]:
    """A list that is empty until SIGTERM arrives."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    return received


def _report_alone_or_together(error: Exception) -> None:
    """Report an error that this rank met, and maybe all of them.

    If all did, rank 0 speaks and torchrun ends the others while they wait here; else the wait is over and they speak.
    """
    if os.environ.get("RANK", "0") == "0":
        report_error(str(error))
    else:
        time.sleep(5)
        print(f"error: rank {os.environ['RANK']}: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
