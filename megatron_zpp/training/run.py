"""What a run consists of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint import FolderLock, Trained
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.data.build import Datasets
from megatron_zpp.data.loader import Batch
from megatron_zpp.families import Architecture
from megatron_zpp.islands import OuterSync
from megatron_zpp.islands.elastic import ElasticIslands
from megatron_zpp.metrics.writers import MetricWriters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.curriculum import Curriculum
from megatron_zpp.optim.loss_scaler import LossScaler
from megatron_zpp.optim.optimizer import set_lr_and_weight_decay
from megatron_zpp.optim.schedule import Schedule
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.pipeline import Pipeline
from megatron_zpp.parallel.sharding import prepare_backward
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import Loss, LossSoFar, mean_loss
from megatron_zpp.zeropp import Ranks, Traffic, ZeroPPInterface
from megatron_zpp.zeropp.fsdp.topology import gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class TrainState:
    """The model that the ranks of one island train together; without islands, all ranks do."""

    model: Transformer  # this rank's part of it
    pipeline: Pipeline | None  # None with one stage
    optimizer: torch.optim.Optimizer
    ranks: Ranks  # that this process computes for
    scaler: LossScaler
    zeropp: ZeroPPInterface | None  # None at ZeRO stage 0, which has no sharded collectives
    zero_stage: int

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Mark whether the next backward pass is the last of this optimizer step."""
        prepare_backward(self.model, self.zero_stage, is_last)
        if self.zeropp is not None:
            self.zeropp.set_is_last_micro_batch(is_last)

    def finish_step(self, overflow: bool, skipped: bool, group: dist.ProcessGroup) -> None:
        """Make ready for the next step, when gradients are gone; after a skipped one as if it had never been.

        group: the ranks that the model adds up over what it has to.
        """
        self.model.finish_step(not skipped, lambda tensor: dist.all_reduce(tensor, group=group))
        scale = self.scaler.scale
        self.scaler.update(overflow=overflow)
        if self.zeropp is not None:
            if skipped:
                self.zeropp.undo_step()
            if self.scaler.scale != scale:
                self.zeropp.rescale_errors(self.scaler.scale / scale)


@dataclass
class Run:
    """The parts of a run."""

    architecture: Architecture
    settings: ResolvedSettings
    device: torch.device
    mesh: Mesh
    states: list[TrainState]  # of this process: one, but for one of each island that it emulates
    islands: OuterSync  # of no islands in an ordinary run
    loss: Loss
    token_traffic: Traffic  # of tokens that are sent to experts
    schedule: Schedule | None  # None with --skip-train
    batches: BatchSchedule
    curriculum: Curriculum | None  # None: every sample has --seq-length tokens
    datasets: Datasets
    writers: MetricWriters
    train_iters: int
    num_eval_micro_batches: int  # per data-parallel rank of this job and evaluation
    counters: Counters
    loss_since_agreement: LossSoFar  # where this island is a job of its own; elsewhere it stays 0
    lock: FolderLock | None = None  # on --save, held by rank 0
    last_loss: float | None = None

    # Of the first state:

    @property
    def model(self) -> Transformer:
        return self.states[0].model

    @property
    def pipeline(self) -> Pipeline | None:
        return self.states[0].pipeline

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.states[0].optimizer

    @property
    def ranks(self) -> Ranks:
        return self.states[0].ranks

    @property
    def zeropp(self) -> ZeroPPInterface | None:
        return self.states[0].zeropp

    # Of all:

    @property
    def world_size(self) -> int:
        """Real or emulated ranks of the run."""
        return len(self.states) * self.ranks.world_size

    @property
    def zeropps(self) -> list[ZeroPPInterface]:
        return [state.zeropp for state in self.states if state.zeropp is not None]

    def set_training(self, mode: bool) -> None:
        """Training mode, or evaluation mode."""
        for state in self.states:
            (state.model if state.pipeline is None else state.pipeline).train(mode)

    def add_over_islands(self, per_state: Sequence[Tensor]) -> Tensor:
        """The sum of a tensor that the ranks of each island have alike, over all islands; collective."""
        total = torch.stack([*per_state]).sum(dim=0)
        if self.mesh.island.size() > 1:
            dist.all_reduce(total, group=self.mesh.island.get_group())
        return total

    def of_all_islands(self, per_state: Sequence[T]) -> list[T]:
        """What the ranks of each island have alike, of all islands in order; collective."""
        of_islands: list[Sequence[T]] = [per_state]
        if self.mesh.island.size() > 1:
            of_islands = gather_objects(per_state, self.mesh.island.get_group())
        return [of_state for of_process in of_islands for of_state in of_process]

    def sample_length(self, iteration: int) -> int:
        """Tokens of a sample in the optimizer step that ends at ``iteration``."""
        return self.settings.training.seq_length if self.curriculum is None else self.curriculum.length(iteration)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates and weight decay of the step to come."""
        assert self.schedule is not None  # it trains
        position = self.scheduled_samples()
        lr, decoupled_lr = self.schedule.lr(position), self.schedule.decoupled_lr(self.settings.optimizer, position)
        weight_decay = self.schedule.weight_decay(self.counters.scheduled_samples)
        set_lr_and_weight_decay(optimizer, lr, weight_decay, decoupled_lr)

    def count_step(self, skipped: bool = False) -> int:
        """Move the counters by an optimizer step, and return the samples that it took."""
        counters = self.counters
        num_samples = self.batches.global_batch_size(counters.consumed_train_samples)
        counters.iteration += 1
        counters.consumed_train_samples += num_samples
        # Islands do not know of each other's skipped steps: their schedules count them, and stay alike.
        if self.has_islands or not skipped:
            cut = self.settings.training.seq_length - self.sample_length(counters.iteration)
            counters.scheduled_samples += num_samples
            counters.cut_tokens += num_samples * cut
        return num_samples

    def scheduled_samples(self) -> float:
        """Where the learning-rate schedule stands: samples, or, if it counts tokens, the whole samples they make."""
        counters, schedule = self.counters, self.settings.schedule
        if counters.cut_tokens and (schedule.lr_decay_tokens is not None or schedule.lr_warmup_tokens):
            return counters.scheduled_samples - counters.cut_tokens / self.settings.training.seq_length
        return counters.scheduled_samples

    @property
    def has_islands(self) -> bool:
        """Whether several islands train by themselves, in this job or in others."""
        return self.settings.distributed.islands > 1

    @property
    def elastic(self) -> ElasticIslands | None:
        """The islands, where this one is a job of its own."""
        return self.islands if isinstance(self.islands, ElasticIslands) else None

    @property
    def samples_of_evaluation(self) -> int:
        """That one evaluation reads, on all ranks together."""
        return self.num_eval_micro_batches * self.settings.training.micro_batch_size * self.mesh.dp_size_of_job

    @property
    def copies(self) -> Sequence[Tensor]:
        """Parameters that another rank of the pipeline has too, and counts."""
        return () if self.pipeline is None else self.pipeline.copies

    def trained(self, with_optimizer: bool) -> Trained:
        """What checkpoints keep as tensors."""
        return Trained(
            models=[state.model for state in self.states],
            optimizers=[state.optimizer for state in self.states] if with_optimizer else [],
            zeropps=self.zeropps,
            islands=self.islands if self.has_islands else None,
            first_island=self.mesh.island.get_local_rank(),
        )

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors; collective."""
        loss_is_finite = self.last_loss is None or math.isfinite(self.last_loss)
        scalers = self.of_all_islands([state.scaler.state_dict() for state in self.states])
        return {
            "settings": self.settings.as_flat_dict(),
            # Of each island: those whose first steps overflow begin later than others.
            "optimizers_have_stepped": self.of_all_islands([bool(t.optimizer.state) for t in self.states]),
            "model_config": dataclasses.asdict(self.model.config),
            "counters": dataclasses.asdict(self.counters),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaler": scalers[0],
            **({"loss_scalers": scalers} if self.has_islands else {}),  # of each island
            "loss": self.last_loss if loss_is_finite else None,  # JSON has no NaN
            "nonfinite": [] if loss_is_finite else ["the loss"],
            "data_order": self.datasets.train.order if self.datasets.train is not None else None,
            "tokens": self.counters.consumed_train_samples * (self.settings.training.seq_length or 0)
            - self.counters.cut_tokens,
            "layout": self.layout(),
        }

    def layout(self) -> dict[str, int | str]:
        """How the ranks are divided, and whether those of a tensor-parallel group draw random numbers alike."""
        sizes: dict[str, int | str] = {**self.mesh.sizes()}
        if self.pipeline is not None:
            sizes["stages"] = str(self.pipeline.placement)
        return sizes | {"sp": int(self.settings.distributed.sequence_parallel and self.mesh.tp_size > 1)}


@dataclass(frozen=True)
class IslandStep:
    """What one optimizer step did in an island; the same on each of its ranks."""

    loss_sum: float  # over the island's tokens
    num_tokens: float
    auxiliary: dict[str, float]  # auxiliary losses and what else a model shows: means over micro-batches and ranks
    grad_norm: float  # before clipping
    num_zeros: int | None
    nonfinite: bool  # loss or gradients have NaN or Inf
    spiked: bool  # the loss was far above that of the steps before
    stop: bool  # some rank wants to save and exit
    micro_batches: list[Batch] = field(repr=False)  # this rank's, or in turn those of all that it emulates

    @property
    def skipped(self) -> bool:
        """Whether the parameters did not move."""
        return self.nonfinite or self.spiked

    @property
    def loss(self) -> float:
        return mean_loss(self.loss_sum, self.num_tokens)


@dataclass(frozen=True)
class Due:
    """Each is known before the run begins, and so to all ranks alike."""

    log: bool
    evaluate: bool  # during training; an evaluation of its own follows the last iteration
    save: bool
    exit: bool
    end: bool  # it is the last iteration

    @property
    def anything(self) -> bool:
        return any(dataclasses.astuple(self))


def what_is_due(settings: ResolvedSettings, iteration: int, train_iters: int) -> Due:
    """Return what to do after ``iteration``, counted from 1."""
    training, checkpoint = settings.training, settings.checkpoint

    def divides(interval: int | None) -> bool:
        return bool(interval) and iteration % (interval or 1) == 0

    return Due(
        log=divides(settings.logging.log_interval) or iteration == 1,
        evaluate=divides(training.eval_interval) and iteration < train_iters,
        save=checkpoint.save is not None and divides(checkpoint.save_interval),
        exit=divides(training.exit_interval),
        end=iteration == train_iters,
    )
