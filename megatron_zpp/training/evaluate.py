"""Validation and test loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.transformer import as_model_output
from megatron_zpp.training.run import Run, Trainee
from megatron_zpp.training.step import Target, count_once, masked_sum, mean_loss, to_inputs


@torch.no_grad()
def evaluate(
    run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean loss per token over ``num_micro_batches`` of every data-parallel rank; the model ends in training mode.

    Islands evaluate the parameters that they last agreed on, each on its part of the data. Auxiliary losses are left
    out. ``stop`` is asked before each batch, and must answer alike on all ranks: True ends the evaluation without a
    result, None.
    """
    is_stopped = False
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    run.set_training(False)
    # A pipeline is full when it has as many micro-batches as ranks.
    at_once = run.mesh.pp_size
    with (
        progress("evaluating", num_micro_batches) as advance,
        run.islands.agreed_parameters() if run.islands is not None else nullcontext(),
        _training_traffic_alone(run),
        run.token_traffic.evaluating(),
    ):
        for start in range(0, num_micro_batches, at_once):
            if is_stopped := stop():
                break
            count = min(at_once, num_micro_batches - start)
            for trainee in run.trainees:
                for as_rank in trainee.ranks:
                    with as_rank:
                        totals += _summed_losses(trainee, [to_inputs(run, next(batches)) for _ in range(count)])
            advance(count)
    dist.all_reduce(count_once(run, totals))
    run.set_training(True)
    loss_sum, num_tokens = totals.tolist()
    return None if is_stopped else mean_loss(loss_sum, num_tokens)


def _summed_losses(trainee: Trainee, micro_batches: Sequence[tuple[Batch, Target]]) -> Tensor:
    """The summed loss of micro-batches and their tokens, fp64 [2]; zeros where other stages have the losses."""
    inputs, targets = zip(*micro_batches, strict=True)
    if trainee.pipeline is not None:
        of_tokens = trainee.pipeline.forward(inputs)  # none but on the last stage
    else:
        of_tokens = [as_model_output(trainee.model(**of_micro_batch)).losses for of_micro_batch in inputs]
    totals = torch.zeros(2, dtype=torch.float64, device=targets[0][0].device)
    for losses, target in zip(of_tokens, targets, strict=False):
        totals += torch.stack(masked_sum(losses, target))
    return totals


@contextmanager
def _training_traffic_alone(run: Run) -> Iterator[None]:
    """Keep an evaluation out of the log's bytes, but for what it gathers in the next training step's stead."""
    with ExitStack() as stack:
        for zeropp in run.zeropps:
            stack.enter_context(zeropp.traffic.evaluating(own_weights=run.islands is None))
        yield
