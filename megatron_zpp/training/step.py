"""One optimizer step. CONTRIBUTING.md draws it, under "One step", with all that crosses the network."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.models.transformer import ModelOutput, as_model_output
from megatron_zpp.optim.gradients import clip_gradients, count_zeros, sum_of_squares, sum_over_all_ranks
from megatron_zpp.training.loss import LossTotals
from megatron_zpp.training.trainer import StepStats, Trainer


def train_step(trainer: Trainer, batches: Iterator[Batch], num_micro_batches: int, stop: bool) -> StepStats:
    """Run one optimizer step: accumulate gradients, clip, update the parameters. stop: this rank wants to exit."""
    begin = time.perf_counter()
    if trainer.curriculum is not None:
        length = trainer.sample_length(trainer.counters.iteration + 1)
        batches = ({name: tensor[:, :length].contiguous() for name, tensor in batch.items()} for batch in batches)
    totals, names, micro_batches = accumulate_gradients(trainer, batches, num_micro_batches)
    stats = measure_and_clip(trainer, totals, names, micro_batches, stop)
    if not stats.is_skipped:
        trainer.set_learning_rate()
        trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.finish_step(stats)
    return dataclasses.replace(stats, seconds=time.perf_counter() - begin)


def accumulate_gradients(
    trainer: Trainer, batches: Iterator[Batch], num_micro_batches: int
) -> tuple[Tensor, list[str], list[Batch]]:
    """Run the forward and backward passes of one step. Reduced gradients are still multiplied by the loss scale.

    Returns this rank's summed loss, its count, and A auxiliary losses and observations, fp64 [2 + A], to be summed over
    all ranks; the names of these A; and the micro-batches that it read.
    """
    per_token = trainer.settings.training.calculate_per_token_loss
    totals = LossTotals(trainer.mesh, trainer.device, num_micro_batches, trainer.scaler.scale, per_token=per_token)
    if trainer.pipeline is not None:
        read = [next(batches) for _ in range(num_micro_batches)]
        micro_batches = [trainer.loss.split(batch) for batch in read]

        def add_of_stage(output: ModelOutput, micro_batch: int) -> Tensor | float:
            return totals.add_auxiliary(output, micro_batches[micro_batch][1])

        trainer.pipeline.forward_backward(micro_batches, totals.add, add_of_stage)
        names = trainer.pipeline.names_of_all_stages(list(totals.auxiliary))
        return totals.local_totals(names), names, read
    read = []
    for i in range(num_micro_batches):
        trainer.set_is_last_micro_batch(i == num_micro_batches - 1)
        read.append(next(batches))
        inputs, target = trainer.loss.split(read[-1])
        output = as_model_output(trainer.model(**inputs))  # FSDP2 calls zeropp/gather, and below zeropp/reduce too
        (totals.add(output.losses, target) + totals.add_auxiliary(output, target)).backward()
    names = list(totals.auxiliary)
    return totals.local_totals(names), names, read


def measure_and_clip(
    trainer: Trainer, totals: Tensor, names: Sequence[str], micro_batches: list[Batch], stop: bool
) -> StepStats:
    """Measure the gradients, scale and clip them, and sum over the step's ranks all that they must know of it.

    totals, names, micro_batches: from ``accumulate_gradients``. One collective; here alone the host waits for the
    device between the last backward pass and the optimizer.
    """
    training, counters, fsdp_size = trainer.settings.training, trainer.counters, trainer.mesh.fsdp_size
    measures = [sum_of_squares, *([count_zeros] if trainer.settings.logging.log_num_zeros_in_grad else [])]
    parameters = list(trainer.model.parameters())
    totals = torch.cat([totals, totals.new_full((1,), float(stop))])
    sums = sum_over_all_ranks(measures, parameters, trainer.copies, totals=totals, group=trainer.mesh.step_group)
    measured, counted = sums.split([len(measures), len(totals)])
    per_token = training.calculate_per_token_loss
    factor = fsdp_size / counted[1].clamp(min=1.0) if per_token else 1.0  # [1]: tokens
    norm = clip_gradients(parameters, trainer.settings.optimizer.clip_grad, measured[0], factor / trainer.scaler.scale)
    numbers = torch.cat([norm.double().view(1), measured[1:], counted]).tolist()  # the host waits
    grad_norm, *zeros = numbers[: len(measures)]
    loss_sum, num_tokens, *auxiliary_sums, stops = numbers[len(measures) :]
    loss = loss_sum / max(1.0, num_tokens)  # 0 where nothing counts
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spike_factor = training.loss_spike_factor
    # Scale auxiliary losses like their gradients, which FSDP2 averages over ranks.
    auxiliary_factor = 1 / max(1.0, num_tokens) if per_token else 1 / fsdp_size
    return StepStats(
        loss=loss,
        num_tokens=num_tokens,
        num_samples=len(micro_batches) * training.micro_batch_size * trainer.mesh.dp_size,
        auxiliary={name: value * auxiliary_factor for name, value in zip(names, auxiliary_sums, strict=True)},
        grad_norm=grad_norm,
        num_zeros=round(zeros[0]) if zeros else None,
        loss_scale=trainer.scaler.scale,
        is_nonfinite=not is_finite,
        has_spiked=is_finite and spike_factor is not None and counters.is_loss_spike(loss, spike_factor),
        should_stop=stops > 0,
        micro_batches=micro_batches,
    )
