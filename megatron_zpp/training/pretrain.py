"""The training loop: everything that happens in a run, in the order in which it happens."""

import gc
import signal
import time

from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import StopSignals, errors_on_all_ranks, print_once
from megatron_zpp.publish import PublishError
from megatron_zpp.training.data import BatchIterators
from megatron_zpp.training.evaluate import evaluate_tasks, test, validate
from megatron_zpp.training.nonfinite import NonfiniteSteps, NotFiniteError
from megatron_zpp.training.profile import StepProfile
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.run import Checkpoints, Run, build_publisher, publish, what_is_due
from megatron_zpp.training.step import train_step


def train(run: Run, start: float) -> None:
    """Step, log, evaluate, save, until the last iteration or a request to stop. Raises NotFiniteError on all ranks."""
    checkpoints, signals = Checkpoints(run), StopSignals(run.device)
    batches = BatchIterators(run)
    if run.settings.training.manual_gc:
        gc.disable()
    if not run.settings.training.skip_train and not _train_steps(run, batches, signals, checkpoints, start):
        return
    if validate(run, batches.valid, signals, "validation") and test(run, signals):
        evaluate_tasks(run, signals)


def _train_steps(
    run: Run, batches: BatchIterators, signals: StopSignals, checkpoints: Checkpoints, start: float
) -> bool:
    """Run the loop; return False if it was asked to stop before the last iteration. Raises NotFiniteError."""
    settings, counters, training = run.settings, run.counters, run.settings.training
    reporter, nonfinite = Reporter(run), NonfiniteSteps(run)
    publisher, is_published = build_publisher(run), True
    with errors_on_all_ranks():
        step_profile = StepProfile(run)
    while counters.iteration < run.train_iters:
        # Train.
        step_profile.before_step(counters.iteration)
        num_micro_batches = run.batches.num_micro_batches(counters.consumed_train_samples)
        minutes = (time.monotonic() - start) / 60
        is_over = training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins
        with reporter.show_compiling():
            stats = train_step(run, batches.train, num_micro_batches, stop=signals.is_asked or is_over)
        # Not earlier: a signal ends a rank at once, whatever it waits for before its first step.
        if training.exit_signal_handler:
            signals.catch()
        elif settings.checkpoint.save is not None:
            signals.catch([signal.SIGINT])
        batch_size = run.count_step(stats)
        iteration = counters.iteration
        due = what_is_due(settings, iteration, run.train_iters)
        asks_to_end = nonfinite.step(stats) or stats.should_stop
        run.islands.after_step(is_last=due.end)  # evaluations and checkpoints have the last steps in them
        ends = run.islands.agree(asks_to_end, meets=due.anything)

        # Log.
        reporter.step(stats, batch_size)
        if checkpoints.saver is not None:
            checkpoints.saver.poll()

        # Publish first: processes that follow the run should not wait for evaluation or saving.
        if publisher is not None and (due.publish or due.end):
            with reporter.paused():
                is_published = publish(publisher, iteration)

        # Evaluate.
        if due.evaluate:
            with reporter.paused():
                ends |= not validate(run, batches.valid, signals)
        if due.evaluate_tasks and not ends:
            with reporter.paused():
                ends = not evaluate_tasks(run, signals)

        # Save.
        ends |= due.end or due.exit
        if checkpoints.saver is not None and (due.save or ends):
            with reporter.paused(), progress("saving checkpoint"):
                checkpoints.save()
                ends = ends or signals.agree()  # asked for meanwhile: this save is the last
                if ends:
                    checkpoints.wait()
        if training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
            gc.collect()

        # End.
        if ends:
            step_profile.end()
            if problem := nonfinite.why_too_many():
                raise NotFiniteError(f"{problem}. {checkpoints.describe()}")
            if not due.end:
                print_once(f"exiting program at iteration {iteration}, {checkpoints.describe()}")
            checkpoints.check_last()
            if due.end and not is_published:
                raise PublishError("the last weights were not published, for the reason above")
            if problem := nonfinite.why_nothing_came_of_it():
                raise NotFiniteError(f"{problem}. {checkpoints.describe()}")
            return due.end
    return True
