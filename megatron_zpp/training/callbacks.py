"""The optional parts of training that flags ask for, in the order in which they act."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint import CheckpointError, CheckpointSaver
from megatron_zpp.checkpoint.resume import goes_on_in
from megatron_zpp.checkpoint.tokenizer import copy_tokenizer
from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.publish import Publisher, PublishError
from megatron_zpp.training.profile import StepProfile
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.stragglers import Stragglers
from megatron_zpp.training.trainer import Callback, StepStats, Trainer


def build_callbacks(trainer: Trainer, reporter: Reporter, checkpoints: CheckpointManager) -> list[Callback]:
    """Build what flags ask for, and put it in order. Collective.

    An error at the end ends what follows: a profile is written before, and a lost checkpoint goes before lost weights.
    """
    settings, callbacks = trainer.settings, list[Callback]()
    if settings.logging.profile:
        with errors_on_all_ranks():
            callbacks.append(StepProfile(trainer))
    callbacks.append(checkpoints)
    if settings.logging.log_straggler:
        callbacks.append(Stragglers(trainer, reporter))  # before a log line, which takes the times that it compares
    callbacks.append(reporter)
    # Processes that follow the run should not wait for an evaluation or a save.
    if settings.checkpoint.publish is not None:
        callbacks.append(WeightPublisher(trainer, settings.checkpoint.publish, reporter))
    if settings.training.manual_gc:
        callbacks.append(GarbageCollection(trainer))
    return callbacks


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


class GarbageCollection(Callback):
    """Collects Python's garbage every ``--log-interval`` steps, at the same time on all ranks, and never else."""

    def __init__(self, trainer: Trainer) -> None:
        gc.disable()
        self._trainer = trainer

    def on_step(self, stats: StepStats) -> None:
        if self._trainer.ends_interval(self._trainer.settings.logging.log_interval):
            gc.collect()


class WeightPublisher(Callback):
    """Publishes weights for other processes (``--publish``)."""

    def __init__(self, trainer: Trainer, folder: str, reporter: Reporter) -> None:
        """Publish what the run begins with. Collective. Raises PublishError if another run publishes there."""
        checkpoint, settings = trainer.settings.checkpoint, trainer.settings.as_flat_dict()

        @functools.cache  # a copy that failed is tried again
        def about() -> dict[str, Any]:
            files = copy_tokenizer(settings, self._publisher.folder)
            return {"settings": settings, "model_config": dataclasses.asdict(trainer.model.config), "files": files}

        self._trainer, self._reporter, self._is_published = trainer, reporter, True
        try:
            self._publisher = Publisher(
                trainer.model,
                folder,
                dtype=torch.float16 if trainer.settings.precision.fp16 else torch.bfloat16,
                resume=trainer.counters.iteration > 0 or goes_on_in(checkpoint),
            )
            self._publisher.about = about
            if trainer.counters.iteration == 0:
                self._publisher.publish(0)
        except PublishError as error:
            raise PublishError(f"--publish {folder}: {error}") from error
        if trainer.counters.iteration > 0:
            self._publish()

    def on_step(self, stats: StepStats) -> None:
        trainer = self._trainer
        is_last = trainer.counters.iteration == trainer.train_iters
        if is_last or trainer.ends_interval(trainer.settings.checkpoint.publish_interval):
            with self._reporter.paused():
                self._publish()

    def on_end(self, problem: str | None) -> None:
        """Raise PublishError if the run is complete, but not its publication."""
        is_complete = self._trainer.counters.iteration == self._trainer.train_iters
        if is_complete and not self._is_published and problem is None:
            raise PublishError("the last weights were not published, for the reason above")

    def _publish(self) -> None:
        """Publish the weights, or say why that failed. Collective."""
        publisher, iteration = self._publisher, self._trainer.counters.iteration
        try:
            publisher.publish(iteration)
            self._is_published = True
        except PublishError as error:
            self._is_published = False
            if dist.get_rank() == 0:
                lost = f"the weights of iteration {iteration} were NOT PUBLISHED (--publish {publisher.folder})"
                print(
                    f"ERROR: {lost}: {error}. Training goes on; readers stay at version {publisher.version}, and the "
                    "next one has all weights",
                    file=sys.stderr,
                    flush=True,
                )
