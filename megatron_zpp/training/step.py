"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from megatron_zpp.training.setup import Run, Trainee

# Of a micro-batch: the loss mask of this rank's tokens [B, S / cp], and the number of unmasked tokens of all ranks that
# share its sequences.
Target = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # before clipping; of islands the mean
    skipped: bool  # the parameters did not move, because loss or gradients were not finite, or
    spiked: bool  # the loss was far above that of the steps before
    stop: bool  # some rank wants to save and exit
    num_zeros: int | None
    auxiliary: dict[str, float]  # auxiliary losses and what else a model shows: means over micro-batches and ranks
    micro_batches: list[Batch] = field(repr=False)  # this rank's, or in turn those of all that it emulates

    def losses(self) -> dict[str, float]:
        """All losses under the names of the log."""
        return {"lm loss": self.loss, **self.auxiliary}


def train_step(run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: bool) -> StepResult:
    """Accumulate gradients over the micro-batches, clip, and let the optimizer step, unless they are not finite."""
    settings, scale = run.settings, run.scaler.scale
    micro_batches: list[Batch] = []
    if run.curriculum is not None:
        batches = _cut(batches, run.sample_length(run.counters.iteration + 1))
    totals, names = accumulate_gradients(run, _remember(batches, micro_batches), num_micro_batches, scale)
    totals[2] = float(stop)
    dist.all_reduce(totals)

    per_token = settings.training.calculate_per_token_loss
    factor = run.mesh.fsdp_size / totals[1].clamp(min=1.0) if per_token else 1.0
    measured = run.add_over_islands(
        [_scale_and_clip(run, trainee, factor / scale).to(totals.device) for trainee in run.trainees]
    )
    # The one time that the host waits for the device between the last backward pass and the optimizer.
    values = torch.cat([totals, measured]).tolist()
    loss_sum_all, num_tokens_all, wishes, *auxiliary_sums = values[: len(totals)]
    grad_norms, *zeros = values[len(totals) :]
    grad_norm = grad_norms / run.mesh.num_islands
    loss = loss_sum_all / max(1.0, num_tokens_all)
    # As their gradients: FSDP2 averages over ranks.
    num_ranks = run.mesh.fsdp_size * run.mesh.num_islands
    auxiliary_factor = 1 / max(1.0, num_tokens_all) if per_token else 1 / num_ranks
    auxiliary = {name: value * auxiliary_factor for name, value in zip(names, auxiliary_sums, strict=True)}
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spiked = finite and is_loss_spike(run, loss)
    skipped = not finite or spiked
    if not skipped:
        assert run.schedule is not None
        position = run.scheduled_samples()
        lr, decoupled_lr = run.schedule.lr(position), run.schedule.decoupled_lr(settings.optimizer, position)
        weight_decay = run.schedule.weight_decay(run.counters.scheduled_samples)
        for trainee in run.trainees:
            set_lr_and_weight_decay(trainee.optimizer, lr, weight_decay, decoupled_lr)
            trainee.optimizer.step()
    elif run.islands is not None:
        run.islands.skip_step()
    for trainee in run.trainees:
        trainee.optimizer.zero_grad()
        trainee.model.finish_step(not skipped, lambda tensor: dist.all_reduce(tensor, group=run.mesh.fsdp.get_group()))
    run.scaler.update(overflow=not finite)
    for zeropp in run.zeropps:
        if skipped:
            zeropp.undo_step()
        if run.scaler.scale != scale:
            zeropp.rescale_errors(run.scaler.scale / scale)
    num_zeros = round(zeros[0]) if zeros else None
    return StepResult(loss, grad_norm, skipped, spiked, wishes > 0, num_zeros, auxiliary, micro_batches)


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
    run: Run, batches: Iterator[Batch], num_micro_batches: int, scale: float
) -> tuple[Tensor, list[str]]:
    """Forward and backward passes of one step, gradients reduced but not scaled back.

    Returns fp64 [3 + A], and A names: this rank's summed loss, its tokens, a 0 to fill in, and its auxiliary losses and
    observations, weighted by ``weighted_auxiliary``; add them over all ranks.
    """
    settings = run.settings
    per_token = settings.training.calculate_per_token_loss
    totals = torch.zeros(3, dtype=torch.float64, device=run.device)
    auxiliary_totals: dict[str, Tensor] = {}

    def scaled_loss(losses: Tensor, target: Target) -> Tensor:
        loss_sum, num_tokens = masked_sum(losses, target)
        totals[:2] += torch.stack([loss_sum.detach(), num_tokens])
        # Megatron's average: over the micro-batch's tokens, then over micro-batches, then (FSDP2) over ranks. FSDP2
        # averages over a context-parallel group too, whose parts of the loss are to be added.
        mean = loss_sum * run.mesh.cp_size / num_tokens.clamp(min=1)
        return (loss_sum if per_token else mean / num_micro_batches) * scale

    def weighted_auxiliary(output: ModelOutput, target: Target) -> Tensor | float:
        # Averaged over micro-batches and (FSDP2) over ranks; per token, over the tokens that are in them. Ranks of a
        # context-parallel group count the same tokens.
        weight = target[1] / run.mesh.cp_size if per_token else 1 / num_micro_batches
        for name, value in (*output.auxiliary.items(), *output.observed.items()):
            so_far = auxiliary_totals.setdefault(name, torch.zeros((), dtype=torch.float64, device=run.device))
            so_far += value.detach() * weight
        return sum(output.auxiliary.values()) * weight * scale

    if run.pipeline is not None:
        micro_batches = [to_inputs(run, next(batches)) for _ in range(num_micro_batches)]

        def of_stage(output: ModelOutput) -> Tensor | float:
            if output.auxiliary and per_token:  # a stage does not know whose tokens it has
                raise ValueError(
                    "auxiliary losses per token do not work in a pipeline: leave --calculate-per-token-loss out, or "
                    "--pipeline-model-parallel-size"
                )
            return weighted_auxiliary(output, micro_batches[0][1])

        run.pipeline.forward_backward(micro_batches, scaled_loss, of_stage)
        names = run.pipeline.names_of_all_stages(list(auxiliary_totals))
        of_names = [auxiliary_totals.get(name, totals.new_zeros(())) for name in names]
        return count_once(run, torch.stack([*totals, *of_names])), names
    for i in range(num_micro_batches):
        is_last = i == num_micro_batches - 1
        for trainee in run.trainees:
            prepare_backward(trainee.model, settings.zero.zero_stage, is_last)
            if trainee.zeropp is not None:
                trainee.zeropp.set_is_last_micro_batch(is_last)
            for as_rank in trainee.ranks:
                with as_rank:
                    inputs, target = to_inputs(run, next(batches))
                    output = as_model_output(trainee.model(**inputs))
                    loss = scaled_loss(output.losses, target) + weighted_auxiliary(output, target)
                    loss.backward()
    return count_once(run, torch.stack([*totals, *auxiliary_totals.values()])), list(auxiliary_totals)


def count_once(run: Run, totals: Tensor) -> Tensor:
    """``totals`` [loss, tokens, ...] of ``masked_sum`` without what other ranks count: for a sum over all ranks."""
    if run.mesh.tp_rank > 0:
        totals.zero_()  # all ranks of a tensor-parallel group have the same loss
    if run.mesh.cp_rank > 0:
        totals[1] = 0  # each rank of a context-parallel group has a part of the loss, but the tokens of all
    return totals


def _remember(batches: Iterator[Batch], seen: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        seen.append(batch)
        yield batch


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
