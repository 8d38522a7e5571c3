"""One optimizer step of each island; without islands, all ranks are one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.models.transformer import ModelOutput, as_model_output
from megatron_zpp.optim.gradients import clip_gradients, count_zeros, scale_gradients
from megatron_zpp.optim.optimizer import set_lr_and_weight_decay
from megatron_zpp.parallel.context import shard_batch
from megatron_zpp.parallel.sharding import prepare_backward
from megatron_zpp.training.run import Run, Trainee

# Of a micro-batch: the loss mask of this rank's tokens [B, S / cp], and the number of unmasked tokens of all ranks that
# share its sequences.
Target = tuple[Tensor, Tensor]


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
        """The parameters did not move."""
        return self.nonfinite or self.spiked

    @property
    def loss(self) -> float:
        return mean_loss(self.loss_sum, self.num_tokens)


def mean_loss(loss_sum: float, num_tokens: float) -> float:
    """Per token; 0 where all tokens are masked."""
    return loss_sum / max(1.0, num_tokens)


def train_step(run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: bool) -> list[IslandStep]:
    """Accumulate gradients over the micro-batches, clip, and let the optimizer step, unless they are not finite.

    Of each trainee. No island waits for another here, unless an agreement is due.
    """
    settings = run.settings
    if run.curriculum is not None:
        batches = _cut(batches, run.sample_length(run.counters.iteration + 1))
    totals, names, micro_batches = accumulate_gradients(run, run.trainees, batches, num_micro_batches)
    totals = torch.cat([totals, totals.new_full((len(totals), 1), float(stop))], dim=1)
    dist.all_reduce(totals, group=run.mesh.ranks_of_island)

    per_token = settings.training.calculate_per_token_loss
    measured = []
    for trainee, num_tokens in zip(run.trainees, totals[:, 1].clamp(min=1.0), strict=True):
        factor = run.mesh.fsdp_size / num_tokens if per_token else 1.0
        measured.append(_scale_and_clip(run, trainee, factor / trainee.scaler.scale).to(totals.device))
    # The one time that the host waits for the device between the last backward pass and the optimizer.
    values = torch.cat([totals, torch.stack(measured)], dim=1).tolist()
    steps = []
    for of_trainee, its_batches in zip(values, micro_batches, strict=True):
        loss_sum, num_tokens, *auxiliary_sums, stops = of_trainee[: totals.shape[1]]
        grad_norm, *zeros = of_trainee[totals.shape[1] :]
        loss = mean_loss(loss_sum, num_tokens)
        # As their gradients: FSDP2 averages over ranks.
        auxiliary_factor = 1 / max(1.0, num_tokens) if per_token else 1 / run.mesh.fsdp_size
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        steps.append(
            IslandStep(
                loss_sum=loss_sum,
                num_tokens=num_tokens,
                auxiliary={name: value * auxiliary_factor for name, value in zip(names, auxiliary_sums, strict=True)},
                grad_norm=grad_norm,
                num_zeros=round(zeros[0]) if zeros else None,
                nonfinite=not finite,
                spiked=finite and is_loss_spike(run, loss),
                stop=stops > 0,
                micro_batches=its_batches,
            )
        )
    if run.leaving is not None and not steps[0].skipped:
        run.loss_since_agreement.loss_sum += steps[0].loss_sum
        run.loss_since_agreement.num_tokens += steps[0].num_tokens
    for trainee, step in zip(run.trainees, steps, strict=True):
        _step_optimizer(run, trainee, step)
    for trainee, step in zip(run.trainees, steps, strict=True):
        _finish(run, trainee, step)
    return steps


def _step_optimizer(run: Run, trainee: Trainee, step: IslandStep) -> None:
    """Let the optimizer step, unless the step is to be skipped. Behind the last trainee's, islands may agree."""
    if not step.skipped:
        assert run.schedule is not None
        position = run.scheduled_samples()
        lr, decoupled_lr = run.schedule.lr(position), run.schedule.decoupled_lr(run.settings.optimizer, position)
        weight_decay = run.schedule.weight_decay(run.counters.scheduled_samples)
        set_lr_and_weight_decay(trainee.optimizer, lr, weight_decay, decoupled_lr)
        trainee.optimizer.step()
    elif run.islands is not None and trainee is run.trainees[-1]:
        run.islands.count_step()


def _finish(run: Run, trainee: Trainee, step: IslandStep) -> None:
    """Make ready for the next step; after a skipped one as if it had never been."""
    scaler, scale = trainee.scaler, trainee.scaler.scale
    trainee.optimizer.zero_grad()
    trainee.model.finish_step(not step.skipped, lambda tensor: dist.all_reduce(tensor, group=run.mesh.fsdp.get_group()))
    scaler.update(overflow=step.nonfinite)
    if trainee.zeropp is not None:
        if step.skipped:
            trainee.zeropp.undo_step()
        if scaler.scale != scale:
            trainee.zeropp.rescale_errors(scaler.scale / scale)


def _scale_and_clip(run: Run, trainee: Trainee, factor: float | Tensor) -> Tensor:
    """Gradients as the optimizer takes them; fp64: their norm before clipping and, if it is asked for, their zeros."""
    parameters = list(trainee.model.parameters())
    scale_gradients(parameters, factor)
    norm = clip_gradients(parameters, run.settings.optimizer.clip_grad, trainee.ranks, run.copies)
    measured = [norm.double()]
    if run.settings.logging.log_num_zeros_in_grad:
        measured.append(count_zeros(parameters, trainee.ranks, run.copies))
    return torch.stack(measured)


def is_loss_spike(run: Run, loss: float) -> bool:
    """Whether a finite loss is more than --loss-spike-factor times the average, which then moves towards it.

    A spike moves the average no further than its own limit does, so that a loss that stays high is soon believed.
    """
    factor, average = run.settings.training.loss_spike_factor, run.counters.average_loss
    if factor is None:
        return False
    average = average or loss
    run.counters.average_loss = 0.98 * average + 0.02 * min(loss, factor * average)
    return loss > factor * average


def accumulate_gradients(
    run: Run, trainees: Sequence[Trainee], batches: Iterator[Batch], num_micro_batches: int
) -> tuple[Tensor, list[str], list[list[Batch]]]:
    """Forward and backward passes of one step, gradients reduced but not scaled back.

    Returns, of each of T trainees, this rank's summed loss, its tokens, and its A auxiliary losses and observations,
    fp64 [T, 2 + A], to be added over all ranks of an island; the names of these A; and the micro-batches that it read.
    """
    accumulated = [_Accumulated(run, trainee.scaler.scale, num_micro_batches) for trainee in trainees]
    if run.pipeline is not None:
        (own,) = accumulated
        read = [next(batches) for _ in range(num_micro_batches)]
        micro_batches = [to_inputs(run, batch) for batch in read]
        per_token = run.settings.training.calculate_per_token_loss

        def of_stage(output: ModelOutput) -> Tensor | float:
            if output.auxiliary and per_token:  # a stage does not know whose tokens it has
                raise ValueError(
                    "auxiliary losses per token do not work in a pipeline: leave --calculate-per-token-loss out, or "
                    "--pipeline-model-parallel-size"
                )
            return own.weighted_auxiliary(output, micro_batches[0][1])

        run.pipeline.forward_backward(micro_batches, own.scaled_loss, of_stage)
        names = run.pipeline.names_of_all_stages(list(own.auxiliary))
        return own.totals(names)[None], names, [read]
    read_by_trainee: list[list[Batch]] = [[] for _ in trainees]
    for i in range(num_micro_batches):
        is_last = i == num_micro_batches - 1
        for trainee, own, its_batches in zip(trainees, accumulated, read_by_trainee, strict=True):
            prepare_backward(trainee.model, run.settings.zero.zero_stage, is_last)
            if trainee.zeropp is not None:
                trainee.zeropp.set_is_last_micro_batch(is_last)
            for as_rank in trainee.ranks:
                with as_rank:
                    its_batches.append(next(batches))
                    inputs, target = to_inputs(run, its_batches[-1])
                    output = as_model_output(trainee.model(**inputs))
                    loss = own.scaled_loss(output.losses, target) + own.weighted_auxiliary(output, target)
                    loss.backward()
    names = list(accumulated[0].auxiliary)
    return torch.stack([own.totals(names) for own in accumulated]), names, read_by_trainee


class _Accumulated:
    """Of the micro-batches of a step so far: a trainee's losses and tokens on this rank."""

    def __init__(self, run: Run, scale: float, num_micro_batches: int) -> None:
        self._run, self._scale, self._num_micro_batches = run, scale, num_micro_batches
        self._per_token = run.settings.training.calculate_per_token_loss
        self._loss_and_tokens = torch.zeros(2, dtype=torch.float64, device=run.device)
        self.auxiliary: dict[str, Tensor] = {}  # weighted as in ``weighted_auxiliary``

    def totals(self, names: Sequence[str]) -> Tensor:
        """Loss, tokens and the auxiliary values of these names, for a sum over ranks."""
        zero = self._loss_and_tokens.new_zeros(())
        auxiliary = [self.auxiliary.get(name, zero) for name in names]
        return count_once(self._run, torch.stack([*self._loss_and_tokens, *auxiliary]))

    def scaled_loss(self, losses: Tensor, target: Target) -> Tensor:
        loss_sum, num_tokens = masked_sum(losses, target)
        self._loss_and_tokens += torch.stack([loss_sum.detach(), num_tokens])
        # Megatron's average: over the micro-batch's tokens, then over micro-batches, then (FSDP2) over ranks. FSDP2
        # averages over a context-parallel group too, whose parts of the loss are to be added.
        mean = loss_sum * self._run.mesh.cp_size / num_tokens.clamp(min=1)
        return (loss_sum if self._per_token else mean / self._num_micro_batches) * self._scale

    def weighted_auxiliary(self, output: ModelOutput, target: Target) -> Tensor | float:
        # Averaged over micro-batches and (FSDP2) over ranks; per token, over the tokens that are in them. Ranks of a
        # context-parallel group count the same tokens.
        weight = target[1] / self._run.mesh.cp_size if self._per_token else 1 / self._num_micro_batches
        for name, value in (*output.auxiliary.items(), *output.observed.items()):
            zero = torch.zeros((), dtype=torch.float64, device=self._run.device)
            so_far = self.auxiliary.setdefault(name, zero)
            so_far += value.detach() * weight
        return sum(output.auxiliary.values()) * weight * self._scale


def count_once(run: Run, totals: Tensor) -> Tensor:
    """``totals`` [loss, tokens, ...] of ``masked_sum`` without what other ranks count: for a sum over all ranks."""
    if run.mesh.tp_rank > 0:
        totals.zero_()  # all ranks of a tensor-parallel group have the same loss
    if run.mesh.cp_rank > 0:
        totals[1] = 0  # each rank of a context-parallel group has a part of the loss, but the tokens of all
    return totals


def _cut(batches: Iterator[Batch], length: int) -> Iterator[Batch]:
    """Micro-batches of the first ``length`` tokens of each sample, [B, length]."""
    for batch in batches:
        yield {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}


def to_inputs(run: Run, batch: Batch) -> tuple[Batch, Target]:
    """A micro-batch on the device, this rank's part of its sequences: what the model takes, and what ``masked_sum``."""
    inputs = {name: tensor.to(run.device, non_blocking=True) for name, tensor in batch.items()}
    num_tokens = inputs["loss_mask"].sum()
    if run.mesh.cp_size > 1:
        inputs = shard_batch(inputs, run.mesh.cp_rank, run.mesh.cp_size)
    return inputs, (inputs.pop("loss_mask"), num_tokens)


def masked_sum(losses: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """The sum of the ``losses`` [B, S / cp] of this rank's tokens that are not masked, and the target's number of
    tokens, fp32 scalars."""
    loss_mask, num_tokens = target
    return (losses * loss_mask).sum(), num_tokens
