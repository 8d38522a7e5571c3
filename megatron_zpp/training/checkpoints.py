"""The checkpoints that a run saves."""

from megatron_zpp.checkpoint import CheckpointError, CheckpointSaver
from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.trainer import Callback, StepStats, Trainer


class CheckpointManager(Callback):
    """Saves in the folder of ``--save``; without one it does nothing. Saves and ``on_end`` are collective."""

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        self._trainer, self._reporter, settings = trainer, reporter, trainer.settings
        self._saver: CheckpointSaver | None = None
        if settings.checkpoint.save is not None:
            timeout_minutes = settings.distributed.distributed_timeout_minutes
            self._saver = CheckpointSaver(settings.checkpoint, timeout_minutes, trainer.lock)

    def on_step(self, stats: StepStats) -> None:
        """Report a save that has finished."""
        if self._saver is not None:
            self._saver.poll()

    def on_save(self) -> None:
        """Begin to save the run; training may go on, and ranks agree in another thread."""
        if self._saver is not None:
            trainer, with_optimizer = self._trainer, not self._trainer.settings.checkpoint.no_save_optim
            with self._reporter.paused(), progress("saving checkpoint"):
                self._saver.save(trainer.counters.iteration, trainer, trainer.meta(), with_optimizer)

    def on_end(self, problem: str | None) -> None:
        """Raise CheckpointError on all ranks if the run's last iteration was not saved."""
        with errors_on_all_ranks():
            if self._saver is not None and not self._is_saved() and problem is None:
                lost = f"the checkpoint of the last iteration, {self._trainer.counters.iteration}, was not saved"
                older = f"the latest one in {self._saver.folder} is older, and the same command goes on from there"
                raise CheckpointError(f"{lost}, for the reason above; {older}")

    def wait(self) -> None:
        """Return when nothing is being saved any more."""
        if self._saver is not None:
            with progress("saving checkpoint"):
                self._saver.wait()

    def describe(self) -> str:
        """Say where the run's last iteration is saved."""
        if self._saver is None:
            return "not saved: there is no --save"
        return f"saved in {self._saver.folder}" if self._is_saved() else "NOT SAVED"

    def _is_saved(self) -> bool:
        assert self._saver is not None
        return self._saver.saved_iteration == self._trainer.counters.iteration
