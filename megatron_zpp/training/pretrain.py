"""The training program: everything that happens in a run, in the order in which it happens."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.checkpoint import CheckpointError, CheckpointSaver
from megatron_zpp.data.loader import Batch, build_loader
from megatron_zpp.metrics.lines import format_validation_lines
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.writers import validation_metrics
from megatron_zpp.parallel.distributed import (
    FailedTogether,
    die,
    errors_on_all_ranks,
    init_distributed,
    leave,
    print_once,
    ranks_of_environment,
    report_error,
)
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.training.evaluate import evaluate
from megatron_zpp.training.nonfinite import NonfiniteSteps
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.setup import Run, build_run
from megatron_zpp.training.step import train_step

# docs/reliability.md lists them: 0 trained to the end, or saved and stopped as asked; 1 crashed.
EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class NotFiniteError(ValueError):
    """Too many steps in a row had NaN or Inf. The state before them is saved."""


def main(architecture: Architecture) -> NoReturn:
    """``pretrain`` as a program."""
    try:
        pretrain(architecture)
    except SystemExit as exit_:
        leave(exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None))
    leave(0)


def pretrain(architecture: Architecture) -> None:
    """Run what the command line says; ends the process with a status unless all went well."""
    start = time.monotonic()
    try:
        settings, mistake, ranks = None, None, DistributedSettings()
        try:
            settings = parse_settings(architecture, world_size=ranks_of_environment())
            ranks = settings.distributed
        except SettingsError as error:
            mistake = error
        # The ranks meet to report a mistake too: torchrun ends them all when the first one leaves.
        device = init_distributed(ranks.distributed_backend, ranks.distributed_timeout_minutes)
        with errors_on_all_ranks():
            if mistake is not None:
                raise mistake
        assert settings is not None
        run = build_run(architecture, settings, device)
        _describe(run)
        train(run, start)
        run.writers.close()
    except FailedTogether:
        sys.exit(EXIT_USER_ERROR)
    except NotFiniteError as error:  # on all ranks
        report_error(str(error))
        sys.exit(EXIT_NOT_FINITE)
    except (ValueError, OSError, ImportError) as error:
        _report_alone_or_together(error)
        sys.exit(EXIT_USER_ERROR)
    except Exception as error:
        die(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(run: Run, start: float) -> None:
    """The loop: step, log, evaluate, save, until the last iteration or a wish to stop. ``start``: monotonic seconds."""
    settings, counters = run.settings, run.counters
    training, checkpoint = settings.training, settings.checkpoint
    saver = _build_saver(run) if checkpoint.save is not None else None
    # Not earlier: before the first step there is nothing to save, and a signal ends a rank that waits for dead ones.
    stop_signals = _catch_stop_signals() if training.exit_signal_handler else []
    valid_batches = _batches(run, "valid", counters.consumed_valid_samples)
    if training.manual_gc:
        gc.disable()

    if not training.skip_train:
        train_batches = _batches(run, "train", counters.consumed_train_samples)
        assert train_batches is not None
        reporter = Reporter(run)
        nonfinite = NonfiniteSteps(run)
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
            if result.spiked:
                print_once(f"note: the loss at iteration {counters.iteration} spiked to {result.loss:g}: step skipped")
            run.last_loss = result.loss
            if saver is not None:
                saver.poll()

            iteration = counters.iteration
            too_many = nonfinite.step(result)
            if training.eval_interval and iteration % training.eval_interval == 0 and iteration < run.train_iters:
                reporter.pause()
                _validate(run, valid_batches)
                reporter.resume()
            stop = result.stop or (training.exit_interval is not None and iteration % training.exit_interval == 0)
            save_is_due = checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0
            ends = stop or too_many or iteration == run.train_iters
            if saver is not None and (save_is_due or ends):
                reporter.pause()
                with progress("saving checkpoint"):
                    _save(run, saver, and_wait=ends)
                reporter.resume()
            if training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
                gc.collect()
            if too_many:
                raise NotFiniteError(f"{nonfinite.report()}. {_where_saved(run, saver)}")
            if ends:
                if iteration < run.train_iters:
                    print_once(f"exiting program at iteration {iteration}, {_where_saved(run, saver)}")
                _check_last_save(run, saver)
            if stop and iteration < run.train_iters:
                return

    if valid_batches is not None:
        _validate(run, valid_batches, "validation")
    test_batches = _batches(run, "test", 0)
    if test_batches is not None:
        loss = evaluate(run, test_batches, run.num_eval_micro_batches)
        _print_losses(run, loss, "test")


def _describe(run: Run) -> None:
    zeropp, world_size = run.zeropp, run.ranks.world_size
    ranks = ("emulated rank" if run.mesh.emulated_ranks > 1 else "rank") + ("s" if world_size > 1 else "")
    print_once(
        f"{run.architecture.name} with {run.architecture.num_parameters(run.model.config):,} parameters, ZeRO stage "
        f"{run.settings.zero.zero_stage} on {world_size} {ranks} ({run.device.type}, torch "
        f"{torch.__version__})"
    )
    if run.pipeline is not None:
        print_once(run.pipeline.describe())
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
        dp_rank=run.mesh.dp_rank if run.mesh.emulated_ranks == 1 else None,
        dp_size=run.mesh.dp_size,
        num_workers=run.settings.data.num_workers,
        device=run.device,
        dataloader_type=run.settings.data.dataloader_type,
        data_sharding=run.settings.data.data_sharding,
    )


def _validate(run: Run, batches: Iterator[Batch] | None, data_set: str | None = None) -> None:
    if batches is None:
        return
    assert run.settings.training.micro_batch_size
    loss = evaluate(run, batches, run.num_eval_micro_batches)
    samples = run.num_eval_micro_batches * run.settings.training.micro_batch_size * run.mesh.dp_size
    run.counters.consumed_valid_samples += samples
    _print_losses(run, loss, data_set)
    metrics = validation_metrics({"lm loss": loss}, run.settings.logging)
    run.writers.write(metrics, run.counters.iteration, run.counters.consumed_train_samples)


def _print_losses(run: Run, loss: float, data_set: str | None) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(*format_validation_lines(run.counters.iteration, {"lm loss": loss}, data_set), sep="\n", flush=True)


def _build_saver(run: Run) -> CheckpointSaver:
    checkpoint = run.settings.checkpoint
    assert checkpoint.save is not None
    keep_last = checkpoint.save_keep_last
    if keep_last is None and checkpoint.save_retain_interval is not None:
        keep_last = 2  # one to go back to if the last is damaged
    return CheckpointSaver(
        checkpoint.save,
        asynchronous=not checkpoint.no_async_save,
        keep_last=keep_last,
        retain_interval=checkpoint.save_retain_interval,
        timeout_minutes=run.settings.distributed.distributed_timeout_minutes,
    )


def _save(run: Run, saver: CheckpointSaver, and_wait: bool) -> None:
    checkpoint = run.settings.checkpoint
    optimizer = None if checkpoint.no_save_optim else run.optimizer
    save_rng = not checkpoint.no_save_rng
    saver.save(run.counters.iteration, run.model, optimizer, run.zeropp, run.meta(), save_rng)
    if and_wait:
        saver.wait()


def _where_saved(run: Run, saver: CheckpointSaver | None) -> str:
    if saver is None:
        return "not saved: there is no --save"
    return f"saved in {saver.folder}" if saver.saved_iteration == run.counters.iteration else "NOT SAVED"


def _check_last_save(run: Run, saver: CheckpointSaver | None) -> None:
    with errors_on_all_ranks():
        if saver is not None and saver.saved_iteration != run.counters.iteration:
            raise CheckpointError(
                f"the checkpoint of the last iteration, {run.counters.iteration}, was not saved, for the reason above; "
                f"the latest one in {saver.folder} is older, and the same command goes on from there"
            )


def _catch_stop_signals() -> list[int]:
    """A list that is empty until a signal asks to save and stop."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
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
