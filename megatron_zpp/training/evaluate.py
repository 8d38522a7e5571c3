"""Validation and test loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_zpp.data.loader import Batch
from megatron_zpp.training.logging import progress
from megatron_zpp.training.setup import Run
from megatron_zpp.training.step import as_each_rank, count_once, summed_loss


@torch.no_grad()
def evaluate(run: Run, batches: Iterator[Batch], num_micro_batches: int) -> float:
    """Mean loss per token over ``num_micro_batches`` of every data-parallel rank; the model ends in training mode."""
    run.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    with progress("evaluating", num_micro_batches) as advance:
        for _ in range(num_micro_batches):
            for as_rank in as_each_rank(run):
                with as_rank:
                    totals += torch.stack(summed_loss(run, next(batches)))
            advance(1)
    dist.all_reduce(count_once(run, totals))
    run.model.train()
    if run.zeropp is not None:
        run.zeropp.traffic.take()  # the log counts training's traffic
    loss_sum, num_tokens = totals.tolist()
    return loss_sum / max(1.0, num_tokens)
