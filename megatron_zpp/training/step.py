"""One optimizer step, and the loss of one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.data.build import Batch
from megatron_zpp.parallel.sharding import prepare_backward
from megatron_zpp.training.optimizer import clip_gradients, count_zeros, scale_gradients, set_lr_and_weight_decay
from megatron_zpp.training.setup import Run


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # before clipping
    skipped: bool  # the gradients were not finite
    stop: bool  # some rank wants to save and exit
    num_zeros: int | None


def train_step(run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: bool) -> StepResult:
    """Accumulate gradients over the micro-batches, clip, and let the optimizer step, unless they are not finite."""
    settings, model = run.settings, run.model
    per_token, scale = settings.training.calculate_per_token_loss, run.scaler.scale
    totals = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss, tokens, wish to stop
    for i in range(num_micro_batches):
        is_last = i == num_micro_batches - 1
        prepare_backward(model, settings.zero.zero_stage, is_last)
        if run.zeropp is not None:
            run.zeropp.set_is_last_micro_batch(is_last)
        loss_sum, num_tokens = summed_loss(model, next(batches), run.device)
        # Megatron's average: over the micro-batch's tokens, then over micro-batches, then (FSDP2) over ranks.
        loss = loss_sum if per_token else loss_sum / num_tokens.clamp(min=1) / num_micro_batches
        (loss * scale).backward()
        totals[:2] += torch.stack([loss_sum.detach(), num_tokens])
    totals[2] = float(stop)
    dist.all_reduce(totals)
    loss_sum_all, num_tokens_all, wishes = totals.tolist()

    parameters = list(model.parameters())
    per_token_factor = dist.get_world_size() / max(1.0, num_tokens_all) if per_token else 1.0
    scale_gradients(parameters, per_token_factor / scale)
    grad_norm = clip_gradients(parameters, settings.optimizer.clip_grad)
    num_zeros = count_zeros(parameters) if settings.logging.log_num_zeros_in_grad else None
    skipped = not math.isfinite(grad_norm)
    if not skipped:
        assert run.schedule is not None
        samples = run.counters.scheduled_samples
        set_lr_and_weight_decay(run.optimizer, run.schedule.lr(samples), run.schedule.weight_decay(samples))
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.scaler.update(overflow=skipped)
    if run.zeropp is not None:
        if skipped:
            run.zeropp.undo_step()
        if run.scaler.scale != scale:
            run.zeropp.rescale_errors(run.scaler.scale / scale)
    return StepResult(loss_sum_all / max(1.0, num_tokens_all), grad_norm, skipped, wishes > 0, num_zeros)


def summed_loss(model: nn.Module, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sum of the loss over a micro-batch's unmasked tokens, and their number, both fp32 scalars."""
    tokens, labels, loss_mask = (batch[k].to(device, non_blocking=True) for k in ("tokens", "labels", "loss_mask"))
    losses = model(tokens, labels)  # [B, S]
    return (losses * loss_mask).sum(), loss_mask.sum()
