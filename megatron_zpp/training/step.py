"""One optimizer step."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.models.transformer import ModelOutput, as_model_output
from megatron_zpp.optim.gradients import clip_gradients, count_zeros, sum_of_squares, sum_over_all_ranks
from megatron_zpp.training.loss import LossTotals, mean_loss
from megatron_zpp.training.run import Run, StepStats


def train_step(run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: bool) -> StepStats:
    """Run one optimizer step: accumulate gradients, clip, and update the parameters.

    stop: this rank wants to save and exit.
    """
    if run.curriculum is not None:
        length = run.sample_length(run.counters.iteration + 1)
        batches = ({name: tensor[:, :length].contiguous() for name, tensor in batch.items()} for batch in batches)

    # Forward and backward.
    totals, names, micro_batches = accumulate_gradients(run, batches, num_micro_batches)
    totals = torch.cat([totals, totals.new_full((1,), float(stop))])

    # Measure the gradients, and add up all that ranks must know in one collective. Scale and clip.
    measures = [sum_of_squares, *([count_zeros] if run.settings.logging.log_num_zeros_in_grad else [])]
    parameters = list(run.model.parameters())
    sums = sum_over_all_ranks(measures, parameters, run.copies, totals=totals, group=run.mesh.step_group)
    per_token = run.settings.training.calculate_per_token_loss
    measured, counted = sums.split([len(measures), len(totals)])
    factor = run.mesh.fsdp_size / counted[1].clamp(min=1.0) if per_token else 1.0  # [1]: tokens
    norm = clip_gradients(parameters, run.settings.optimizer.clip_grad, measured[0], factor / run.scaler.scale)

    # Read the results: here alone the host waits for the device between the last backward pass and the optimizer.
    numbers = torch.cat([norm.double().view(1), measured[1:], counted]).tolist()
    grad_norm, *zeros = numbers[: len(measures)]
    loss_sum, num_tokens, *auxiliary_sums, stops = numbers[len(measures) :]
    loss = mean_loss(loss_sum, num_tokens)
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spike_factor = run.settings.training.loss_spike_factor
    # Scale auxiliary losses like their gradients, which FSDP2 averages over ranks.
    auxiliary_factor = 1 / max(1.0, num_tokens) if per_token else 1 / run.mesh.fsdp_size
    stats = StepStats(
        loss=loss,
        num_tokens=num_tokens,
        auxiliary={name: value * auxiliary_factor for name, value in zip(names, auxiliary_sums, strict=True)},
        grad_norm=grad_norm,
        num_zeros=round(zeros[0]) if zeros else None,
        loss_scale=run.scaler.scale,
        is_nonfinite=not is_finite,
        has_spiked=is_finite and spike_factor is not None and run.counters.is_loss_spike(loss, spike_factor),
        should_stop=stops > 0,
        micro_batches=micro_batches,
    )

    # Move the parameters.
    if not stats.is_skipped:
        run.set_learning_rate()
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.finish_step(stats)
    return stats


def accumulate_gradients(
    run: Run, batches: Iterator[Batch], num_micro_batches: int
) -> tuple[Tensor, list[str], list[Batch]]:
    """Run the forward and backward passes of one step. Reduced gradients are still multiplied by the loss scale.

    Returns this rank's summed loss, its count, and A auxiliary losses and observations, fp64 [2 + A], to be summed over
    all ranks; the names of these A; and the micro-batches that it read.
    """
    per_token = run.settings.training.calculate_per_token_loss
    totals = LossTotals(run.mesh, run.device, num_micro_batches, run.scaler.scale, per_token=per_token)
    if run.pipeline is not None:
        read = [next(batches) for _ in range(num_micro_batches)]
        micro_batches = [run.loss.split(batch) for batch in read]

        def add_of_stage(output: ModelOutput, micro_batch: int) -> Tensor | float:
            return totals.add_auxiliary(output, micro_batches[micro_batch][1])

        run.pipeline.forward_backward(micro_batches, totals.add, add_of_stage)
        names = run.pipeline.names_of_all_stages(list(totals.auxiliary))
        return totals.local_totals(names), names, read
    read = []
    for i in range(num_micro_batches):
        run.set_is_last_micro_batch(i == num_micro_batches - 1)
        read.append(next(batches))
        inputs, target = run.loss.split(read[-1])
        output = as_model_output(run.model(**inputs))
        (totals.add(output.losses, target) + totals.add_auxiliary(output, target)).backward()
    names = list(totals.auxiliary)
    return totals.local_totals(names), names, read
