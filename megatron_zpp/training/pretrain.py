"""The training loop: everything that happens in a run, in the order in which it happens."""

import signal
import time
from collections.abc import Sequence

from megatron_zpp.parallel.distributed import StopSignals, print_once
from megatron_zpp.training.callbacks import CheckpointManager, build_callbacks
from megatron_zpp.training.data import batches_of
from megatron_zpp.training.evaluate import LossEvaluation, TaskEvaluation
from megatron_zpp.training.nonfinite import NonfiniteSteps, NotFiniteError
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.step import train_step
from megatron_zpp.training.trainer import Callback, Trainer


def train(trainer: Trainer, start: float) -> None:
    """Step, log, evaluate, save, until the last iteration or a request to stop. Raises NotFiniteError on all ranks.

    start: when the program started, in seconds of ``time.monotonic``.
    """
    signals = StopSignals(trainer.device)
    tasks = [] if trainer.plan.tasks is None else [TaskEvaluation(trainer, signals, trainer.plan.tasks)]
    evaluations: list[Callback] = [LossEvaluation(trainer, signals), *tasks]
    if not trainer.settings.training.skip_train and not _train_steps(trainer, signals, evaluations, start):
        return
    for evaluation in evaluations:
        if not evaluation.on_evaluate(is_last=True):
            break


def _train_steps(trainer: Trainer, signals: StopSignals, evaluations: Sequence[Callback], start: float) -> bool:
    """Run the loop; return False if it was asked to stop before the last iteration. Raises NotFiniteError."""
    counters, training = trainer.counters, trainer.settings.training
    batches = batches_of(trainer, "train", counters.consumed_train_samples) or iter(())
    reporter, nonfinite = Reporter(trainer), NonfiniteSteps(trainer)
    checkpoints = CheckpointManager(trainer, reporter)
    callbacks = [*build_callbacks(trainer, reporter, checkpoints), *evaluations]
    while counters.iteration < trainer.train_iters:
        # Train.
        for callback in callbacks:
            callback.before_step()
        num_micro_batches = trainer.batches.num_micro_batches(counters.consumed_train_samples)
        minutes = (time.monotonic() - start) / 60
        is_over = training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins
        with reporter.show_compiling():
            stats = train_step(trainer, batches, num_micro_batches, stop=signals.is_asked or is_over)
        # Not earlier: a signal ends a rank at once, whatever it waits for before its first step.
        if training.exit_signal_handler:
            signals.catch()
        elif trainer.settings.checkpoint.save is not None:
            signals.catch([signal.SIGINT])
        trainer.count_step(stats)
        actions = trainer.actions()
        # First: a step with NaN is computed again, to find its place, and islands may then replace its parameters.
        ends = nonfinite.check(stats) or stats.should_stop
        ends = trainer.islands.end_step(counters.iteration, ends, is_last=actions.end, meets=actions.any)

        # Log, publish, and so on.
        for callback in callbacks:
            callback.on_step(stats)

        # Evaluate.
        if actions.evaluate:
            with reporter.paused():
                ends |= not all(callback.on_evaluate(is_last=False) for callback in callbacks)

        # Save, also after steps with NaN: they were skipped, and the parameters are those before.
        ends |= actions.exit or actions.end
        if actions.save or ends:
            for callback in callbacks:
                callback.on_save()
            ends = ends or signals.agree()  # asked for meanwhile: this save is the last

        # End.
        if ends:
            checkpoints.wait()
            problem = nonfinite.problem_at_end()
            if not actions.end and problem is None:
                print_once(f"exiting program at iteration {counters.iteration}, {checkpoints.describe()}")
            for callback in callbacks:
                callback.on_end(problem)
            if problem is not None:
                raise NotFiniteError(f"{problem}. {checkpoints.describe()}")
            return actions.end
    return True
