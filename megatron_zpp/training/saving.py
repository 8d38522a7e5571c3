"""The checkpoints that a run saves, and what it says of them."""

from __future__ import annotations

from megatron_zpp.checkpoint import CheckpointError, CheckpointSaver
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.training.run import Run


class Checkpoints:
    """Those of ``--save``; without it every method does nothing. All are collective."""

    def __init__(self, run: Run) -> None:
        self._run, checkpoint = run, run.settings.checkpoint
        self._saver: CheckpointSaver | None = None
        if checkpoint.save is None:
            return
        keep_last = checkpoint.save_keep_last
        if keep_last is None and checkpoint.save_retain_interval is not None:
            keep_last = 2  # one to go back to if the last is damaged
        self._saver = CheckpointSaver(
            checkpoint.save,
            asynchronous=not checkpoint.no_async_save,
            keep_last=keep_last,
            retain_interval=checkpoint.save_retain_interval,
            timeout_minutes=run.settings.distributed.distributed_timeout_minutes,
            lock=run.lock,
        )

    @property
    def are_saved(self) -> bool:
        return self._saver is not None

    def save(self) -> None:
        """Begin to save what the run has now; training may go on."""
        if self._saver is not None:
            run, checkpoint = self._run, self._run.settings.checkpoint
            trained = run.trained(with_optimizer=not checkpoint.no_save_optim)
            self._saver.save(run.counters.iteration, trained, run.meta(), not checkpoint.no_save_rng)

    def poll(self) -> None:
        """Complete the save that is under way, if it is done; after each step."""
        if self._saver is not None:
            self._saver.poll()

    def wait(self) -> None:
        """Wait for the save that is under way."""
        if self._saver is not None:
            self._saver.wait()

    def check_last(self) -> None:
        """Raise CheckpointError on all ranks if what the run has now was not saved."""
        with errors_on_all_ranks():
            if self._saver is not None and self._saver.saved_iteration != self._run.counters.iteration:
                raise CheckpointError(
                    f"the checkpoint of the last iteration, {self._run.counters.iteration}, was not saved, for the "
                    f"reason above; the latest one in {self._saver.folder} is older, and the same command goes on from "
                    "there"
                )

    def describe(self) -> str:
        """Say where what the run has now is saved."""
        if self._saver is None:
            return "not saved: there is no --save"
        saver, iteration = self._saver, self._run.counters.iteration
        return f"saved in {saver.folder}" if saver.saved_iteration == iteration else "NOT SAVED"
