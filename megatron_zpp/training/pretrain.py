"""The training program: everything that happens in a run, in the order in which it happens."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NoReturn

import torch.distributed as dist

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.checkpoint import CheckpointError, CheckpointSaver
from megatron_zpp.data.loader import Batch
from megatron_zpp.metrics.lasting import keep_streams
from megatron_zpp.metrics.lines import format_validation_lines
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.writers import validation_metrics
from megatron_zpp.parallel.distributed import (
    FailedTogether,
    die,
    errors_on_all_ranks,
    init_distributed,
    is_first_rank,
    leave,
    messages_of,
    print_once,
    ranks_of_environment,
    report_error,
)
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.training.batches import Streams, batches_of
from megatron_zpp.training.counting import count_step
from megatron_zpp.training.describe import describe
from megatron_zpp.training.dry_run import dry_run
from megatron_zpp.training.due import what_is_due
from megatron_zpp.training.evaluate import evaluate
from megatron_zpp.training.leaving import join, keep_up, leave_others, report_agreement
from megatron_zpp.training.meetings import Meetings
from megatron_zpp.training.profile import StepProfile
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.run import Run
from megatron_zpp.training.setup import build_run
from megatron_zpp.training.step import train_step
from megatron_zpp.training.stop import StopSignals, end_at_once_on_ctrl_c

# docs/reliability.md lists them: 0 trained to the end, or saved and stopped as asked; 1 crashed.
EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 3


class NotFiniteError(ValueError):
    """NaN or Inf in so many steps, in the parameters, or in the last evaluation, that the run came to nothing."""


def main(architecture: Architecture) -> NoReturn:
    """``pretrain`` as a program."""
    keep_streams()
    try:
        pretrain(architecture)
    except SystemExit as exit_:
        leave(exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None))
    leave(0)


def pretrain(architecture: Architecture) -> None:
    """Run what the command line says; ends the process with a status unless all went well."""
    start = time.monotonic()
    try:
        if "--dry-run" in sys.argv[1:]:
            dry_run(architecture)
            return
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
        if settings.training.exit_signal_handler:
            end_at_once_on_ctrl_c()
        run = build_run(architecture, settings, device)
        describe(run)
        try:
            train(run, start)
        except NotFiniteError as error:  # on all ranks
            report_error(str(error))
            run.writers.close()
            sys.exit(EXIT_NOT_FINITE)
        run.writers.close()
    except FailedTogether:
        sys.exit(EXIT_USER_ERROR)
    except (ValueError, OSError, ImportError) as error:
        _report_alone_or_together(error)
        sys.exit(EXIT_USER_ERROR)
    except Exception as error:
        die(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(run: Run, start: float) -> None:
    """Step, log, evaluate, save, until the last iteration or a wish to stop. ``start``: monotonic seconds.

    Raises NotFiniteError on all ranks, after all that can be saved is saved.
    """
    saver = _build_saver(run) if run.settings.checkpoint.save is not None else None
    loaded = run.counters.iteration
    join(run)
    signals = StopSignals(run.device)
    streams = Streams(run)
    if run.settings.training.manual_gc:
        gc.disable()

    if run.counters.iteration == run.train_iters > loaded:  # an island that returns when the others end
        leave_others(run)
        if saver is not None:
            _save(run, saver)
            saver.wait()
            _check_last_save(run, saver)
    if not run.settings.training.skip_train and not _train_steps(run, streams, signals, saver, start):
        return
    if not _validate(run, streams.valid, signals, "validation"):
        return
    test_batches = batches_of(run, "test", 0)
    if test_batches is not None:
        loss = _evaluate(run, test_batches, signals, "test")
        if loss is not None:
            _check_loss(run, loss, "test")


def _train_steps(run: Run, streams: Streams, signals: StopSignals, saver: CheckpointSaver | None, start: float) -> bool:
    """The loop; False if it was asked to stop before the last iteration. Raises NotFiniteError."""
    settings, counters = run.settings, run.counters
    training = settings.training
    assert streams.train is not None
    reporter = Reporter(run)
    meetings = Meetings(run)
    with errors_on_all_ranks():
        step_profile = StepProfile(run)
    while counters.iteration < run.train_iters:
        step_profile.before_step(counters.iteration)
        num_micro_batches = run.batches.num_micro_batches(counters.consumed_train_samples)
        out_of_time = training.exit_duration_in_mins is not None and (
            time.monotonic() - start > training.exit_duration_in_mins * 60
        )
        compiles = settings.activation.compile and reporter.is_first_step
        with progress("compiling") if compiles else nullcontext():
            steps = train_step(run, streams.train, num_micro_batches, stop=signals.is_asked or out_of_time)
        # Not earlier: before the first step there is nothing to save, and a signal ends a rank at once, whatever it
        # waits for.
        if training.exit_signal_handler and not signals.are_caught:
            signals.catch()

        # Islands do not know of each other's skipped steps: their schedules count them, and stay alike.
        batch_size = count_step(run, is_scheduled=run.islands is not None or not steps[0].skipped)
        if run.islands is not None and counters.iteration == run.train_iters:
            run.islands.conclude()  # what is evaluated and saved has the last steps in it
        if keep_up(run):
            streams.seek()
        results = meetings.step(steps, batch_size)
        reporter.step(results, batch_size)
        report_agreement(run)
        if saver is not None:
            saver.poll()

        iteration = counters.iteration
        due = what_is_due(settings, iteration, run.train_iters)
        is_cut_short = False
        if due.evaluate:
            with reporter.paused():
                is_cut_short = not _validate(run, streams.valid, signals)
        too_many_nonfinite = any(result.too_many for result in results)
        is_asked_to_stop = is_cut_short or any(result.stop for result in results)
        ends = due.end or due.exit or is_asked_to_stop or too_many_nonfinite
        if ends:
            leave_others(run)
        if saver is not None and (due.save or ends):
            with reporter.paused(), progress("saving checkpoint"):
                _save(run, saver)
                if not ends and signals.agree():  # asked for meanwhile: this save is the last
                    ends = True
                    leave_others(run)
                if ends:
                    saver.wait()
        if training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
            gc.collect()
        if ends:
            step_profile.end()
            if too_many_nonfinite:
                raise NotFiniteError(f"{meetings.why_too_many()}. {_where_saved(run, saver)}")
            if not due.end:
                print_once(f"exiting program at iteration {iteration}, {_where_saved(run, saver)}")
            _check_last_save(run, saver)
            if problem := meetings.why_nothing():
                raise NotFiniteError(f"{problem}. {_where_saved(run, saver)}")
            return due.end
    return True


def _validate(run: Run, batches: Iterator[Batch] | None, signals: StopSignals, data_set: str | None = None) -> bool:
    """Evaluate on the validation data, if there are any; False if a signal cut that short."""
    if batches is None:
        return True
    loss = _evaluate(run, batches, signals, data_set)
    # Cut short or not: the evaluations to come have the samples that they would have had.
    run.counters.consumed_valid_samples += run.samples_of_evaluation
    if loss is not None:
        metrics = validation_metrics({"lm loss": loss}, run.settings.logging)
        run.writers.write(metrics, run.counters.iteration, run.counters.consumed_train_samples)
        if data_set is not None:
            _check_loss(run, loss, data_set)
    return loss is not None


def _evaluate(run: Run, batches: Iterator[Batch], signals: StopSignals, data_set: str | None) -> float | None:
    """The loss, printed; None if a signal cut that short. ``data_set``: of an evaluation after training."""
    iteration = run.counters.iteration
    loss = evaluate(run, batches, run.num_eval_micro_batches, stop=signals.agree)
    where = f"on the {data_set} set" if data_set else f"at iteration {iteration}"
    if loss is None:
        print_once(f"note: the evaluation {where} was cut short: a signal asked to stop")
        return None
    if dist.get_rank() == dist.get_world_size() - 1:
        print(*format_validation_lines(iteration, {"lm loss": loss}, data_set), sep="\n", flush=True)
    return loss


def _check_loss(run: Run, loss: float, data_set: str) -> None:
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"the loss on the {data_set} set is {loss:g} after iteration {run.counters.iteration}: look at the data, "
            "or go back to an older checkpoint with --ckpt-step"
        )


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
        lock=run.lock,
    )


def _save(run: Run, saver: CheckpointSaver) -> None:
    checkpoint = run.settings.checkpoint
    saver.save(
        run.counters.iteration, run.trained(not checkpoint.no_save_optim), run.meta(), not checkpoint.no_save_rng
    )


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


def _report_alone_or_together(error: Exception) -> None:
    """Report an error that this rank met, and maybe all of them.

    If all did, rank 0 speaks and torchrun ends the others while they wait here; else the wait is over and they speak.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # remembered only, it would not end the wait
    if is_first_rank():
        report_error(*messages_of(error))
    else:
        time.sleep(5)
        print(f"error: rank {os.environ['RANK']}: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
