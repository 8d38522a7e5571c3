"""The parts of a run, what it counts and saves, and what follows a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint import FolderLock, Trained
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.data.loader import Batch
from megatron_zpp.data.source import Datasets
from megatron_zpp.data.text_stream import TextStream
from megatron_zpp.families import Architecture
from megatron_zpp.metrics.writers import MetricWriters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule, Curriculum
from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.optim.schedule import Schedule, set_lr_and_weight_decay
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.pipeline import Pipeline
from megatron_zpp.parallel.sharding import prepare_backward
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.topology import gather_objects

if TYPE_CHECKING:
    from megatron_zpp.integrations.lm_eval import Tasks


@dataclass(frozen=True)
class RunPlan:
    """Where a run begins and how long it is, before it takes memory."""

    checkpoint: Path | None
    meta: dict[str, Any] | None  # the checkpoint's meta.json
    base: Path | None  # the checkpoint of --pretrained-checkpoint
    counters: Counters
    batches: BatchSchedule
    train_iters: int
    num_eval_micro_batches: int  # per data-parallel rank and evaluation
    vocab_size: int  # padded
    unpadded_vocabulary: bool  # it goes on with an imported model, to which every row belongs
    tokenizer: dict[str, Any]  # described
    datasets: Datasets
    tasks: Tasks | None  # from --eval-tasks
    schedule: Schedule | None  # None with --skip-train


@dataclass(kw_only=True)
class Trainer(Trained):
    """The parts of a run; ``Trained`` has those that checkpoints keep."""

    architecture: Architecture
    settings: ResolvedSettings
    device: torch.device
    mesh: Mesh
    model: Transformer  # this rank's part of it
    pipeline: Pipeline | None  # None with one stage
    scaler: LossScaler
    loss: LanguageModelLoss
    token_traffic: Traffic  # bytes of tokens that are sent to experts
    plan: RunPlan
    writers: MetricWriters
    lock: FolderLock | None = None  # on --save, held by rank 0
    last_loss: float | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        self.counters, self.batches, self.schedule = plan.counters, plan.batches, plan.schedule
        self.train_iters, self.datasets = plan.train_iters, plan.datasets
        self.curriculum = Curriculum.from_settings(self.settings.training)  # None: every sample has --seq-length tokens
        # Parameters that another rank of the pipeline has too, and counts.
        self.copies: Sequence[Tensor] = () if self.pipeline is None else self.pipeline.copies
        # Samples that one evaluation reads, on all ranks together.
        micro_batch_size = self.settings.training.micro_batch_size
        self.samples_of_evaluation = plan.num_eval_micro_batches * micro_batch_size * self.mesh.dp_size

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Mark whether the next backward pass is the last of this optimizer step.

        Stages 2 and 3 reduce gradients in each, stages 0 and 1 in the last; qgZ in each within nodes, between nodes in
        the last.
        """
        prepare_backward(self.model, self.settings.zero.zero_stage, is_last)
        if self.zeropp is not None:
            self.zeropp.set_is_last_micro_batch(is_last)

    def finish_step(self, stats: StepStats) -> None:
        """Update what the optimizer does not, and the loss scale; after a skipped step undo ZeRO++'s state."""
        group, scale = self.mesh.fsdp.get_group(), self.scaler.scale  # ranks over which the model sums its statistics
        self.model.finish_step(not stats.is_skipped, lambda tensor: dist.all_reduce(tensor, group=group))
        self.scaler.update(overflow=stats.is_nonfinite)
        if self.zeropp is not None:
            if stats.is_skipped:
                self.zeropp.undo_step()
            if self.scaler.scale != scale:
                self.zeropp.rescale_errors(self.scaler.scale / scale)

    def ends_interval(self, interval: int | None) -> bool:
        """Return whether the step that was counted last is one of every ``interval`` steps; None and 0: never."""
        return bool(interval) and self.counters.iteration % (interval or 1) == 0

    def actions(self) -> StepActions:
        """Return what follows the step that was counted last."""
        training, checkpoint, iteration = self.settings.training, self.settings.checkpoint, self.counters.iteration
        is_last, divides = iteration == self.train_iters, self.ends_interval
        return StepActions(
            log=divides(self.settings.logging.log_interval) or iteration == 1,
            evaluate=(divides(training.eval_interval) or divides(training.eval_tasks_interval)) and not is_last,
            save=checkpoint.save is not None and divides(checkpoint.save_interval),
            exit=divides(training.exit_interval),
            end=is_last,
        )

    def sample_length(self, iteration: int) -> int:
        """Tokens of a sample in the optimizer step that ends at ``iteration``."""
        return self.settings.training.seq_length if self.curriculum is None else self.curriculum.length(iteration)

    def tokens(self) -> int:
        """Tokens that all ranks have trained on."""
        return self.counters.consumed_train_samples * self.settings.training.seq_length - self.counters.cut_tokens

    def set_learning_rate(self) -> None:
        assert self.schedule is not None  # it trains
        position = self.scheduled_samples()
        lr, decoupled_lr = self.schedule.lr(position), self.schedule.decoupled_lr(self.settings.optimizer, position)
        set_lr_and_weight_decay(self.optimizer, lr, self.schedule.weight_decay, decoupled_lr)

    def scheduled_samples(self) -> float:
        """The schedule's position: samples, or the number of whole samples that the tokens make if it counts tokens."""
        counters, schedule = self.counters, self.settings.schedule
        if counters.cut_tokens and (schedule.lr_decay_tokens is not None or schedule.lr_warmup_tokens):
            return counters.scheduled_samples - counters.cut_tokens / self.settings.training.seq_length
        return counters.scheduled_samples

    def count_step(self, stats: StepStats) -> None:
        counters, self.last_loss = self.counters, stats.loss
        counters.iteration += 1
        counters.consumed_train_samples += stats.num_samples
        counters.skipped_iterations += stats.is_skipped
        counters.nan_iterations += not math.isfinite(stats.loss)
        if not stats.is_skipped or self.mesh.step_group is not None:  # other groups do not know that it was skipped
            cut = self.settings.training.seq_length - self.sample_length(counters.iteration)
            counters.scheduled_samples += stats.num_samples
            counters.cut_tokens += stats.num_samples * cut

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the tensors. Collective over islands."""
        loss_is_finite = self.last_loss is None or math.isfinite(self.last_loss)
        # Counted per copy of the model: one whose first steps overflow begins later than others.
        states = self.islands.gather((self.scaler.state_dict(), bool(self.optimizer.state)))
        streams = {k: data.position for k, data in self.datasets._asdict().items() if isinstance(data, TextStream)}
        scalers, have_stepped = map(list, zip(*states, strict=True))
        return {
            "settings": self.settings.as_flat_dict(),
            "optimizers_have_stepped": have_stepped,
            "tokenizer": self.plan.tokenizer,
            "unpadded_vocabulary": self.plan.unpadded_vocabulary,
            "model_config": dataclasses.asdict(self.model.config),
            "counters": dataclasses.asdict(self.counters),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaler": scalers[0],
            "loss_scalers": scalers,
            "loss": self.last_loss if loss_is_finite else None,  # JSON has no NaN
            "nonfinite": [] if loss_is_finite else ["the loss"],
            "data_order": self.datasets.train.order if self.datasets.train is not None else None,
            "streams": gather_objects((self.mesh.dp_rank, streams)) if streams else None,
            "tokens": self.tokens(),
            "layout": self.layout(),
        }

    def layout(self) -> dict[str, int | str]:
        """Return how the ranks are divided, and whether a tensor-parallel group's ranks draw equal random numbers."""
        sizes: dict[str, int | str] = {**self.mesh.sizes}
        if self.pipeline is not None:
            sizes["stages"] = str(self.pipeline.placement)
        return sizes | {"sp": int(self.settings.distributed.sequence_parallel and self.mesh.tp_size > 1)}


@dataclass(frozen=True)
class StepStats:
    """The statistics of one optimizer step; but for the last two, the same on all ranks of ``Mesh.step_group``."""

    loss: float  # mean over the tokens of the global batch
    num_tokens: float  # that have a loss
    num_samples: int  # that all ranks read for it
    auxiliary: dict[str, float]  # auxiliary losses and what else a model shows: means over micro-batches and ranks
    grad_norm: float  # before clipping
    num_zeros: int | None
    loss_scale: float  # that the gradients were computed with
    is_nonfinite: bool  # loss or gradients have NaN or Inf
    has_spiked: bool  # the loss was far above the earlier steps' losses
    should_stop: bool  # some rank wants to save and exit
    micro_batches: list[Batch] = field(repr=False)  # this rank's
    seconds: float = 0.0  # that the step took on this rank

    @property
    def is_skipped(self) -> bool:
        """Whether the parameters stayed as they were."""
        return self.is_nonfinite or self.has_spiked

    def losses(self, name: str) -> dict[str, float]:
        """Return all losses by their names in the log, the one that is trained on under ``name``."""
        return {name: self.loss, **self.auxiliary}


@dataclass(frozen=True)
class StepActions:
    """Actions that follow a step. They depend on settings and iteration only, so all ranks do the same."""

    log: bool
    evaluate: bool  # during training; an evaluation of its own follows the last iteration
    save: bool
    exit: bool
    end: bool  # it is the last iteration

    @property
    def any(self) -> bool:
        return any(dataclasses.astuple(self))


class Callback:
    """An optional part of a run: override what it needs. All ranks call each method at the same steps."""

    def before_step(self) -> None:
        """Act before an optimizer step."""

    def on_step(self, stats: StepStats) -> None:
        """Act after an optimizer step."""

    def on_evaluate(self, is_last: bool) -> bool:
        """Evaluate, where an interval ends or (``is_last``) training has; return False if a signal cut that short."""
        return True

    def on_save(self) -> None:
        """Act where a checkpoint is due."""

    def on_end(self, problem: str | None) -> None:
        """Act after the last step of this start. problem: why the run fails; report no other error beside it."""
