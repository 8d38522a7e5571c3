"""Compute the loss on validation and test data, and scores on tasks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.metrics.lines import format_scores_line, format_validation_lines
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.writers import validation_metrics
from megatron_zpp.models.transformer import as_model_output
from megatron_zpp.parallel.distributed import StopSignals, print_once
from megatron_zpp.training.data import batches_of, find_tokenizer
from megatron_zpp.training.loss import Target, count_once, mean_loss, no_loss
from megatron_zpp.training.nonfinite import NotFiniteError, nonfinite_anywhere
from megatron_zpp.training.run import Run


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    loss: float  # mean per token, without auxiliary losses
    nonfinite: str | None  # where the model has NaN or Inf, looked for if the loss is not finite


@torch.no_grad()
def evaluate(
    run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: Callable[[], bool] = lambda: False
) -> Evaluated | None:
    """Evaluate on ``num_micro_batches`` of every data-parallel rank, with the outer parameters of islands.

    ``stop`` is asked before each batch, and must answer the same on all ranks: True ends the evaluation, which then
    returns None. The model ends in training mode.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    at_once = run.mesh.pp_size  # a pipeline is full when it has as many micro-batches as ranks
    _set_training(run, False)
    try:
        with ExitStack() as stack:
            advance = stack.enter_context(progress("evaluating", num_micro_batches))
            stack.enter_context(run.islands.outer_parameters())
            # Keep the evaluation out of the log's bytes, but for what it gathers in the next training step's stead.
            if run.zeropp is not None:
                stack.enter_context(run.zeropp.traffic.evaluating())
            stack.enter_context(run.token_traffic.evaluating())
            for start in range(0, num_micro_batches, at_once):
                if stop():
                    return None
                count = min(at_once, num_micro_batches - start)
                totals += _sum_and_count(run, [run.loss.split(next(batches)) for _ in range(count)])
                advance(count)
            dist.all_reduce(count_once(run.mesh, totals))
            loss_sum, num_tokens = totals.tolist()
            if num_tokens == 0:
                print_once(f"WARNING: {no_loss('this evaluation')}")
            loss = mean_loss(loss_sum, num_tokens)
            return Evaluated(loss, None if math.isfinite(loss) else nonfinite_anywhere(run))
    finally:
        _set_training(run, True)


def _set_training(run: Run, mode: bool) -> None:
    (run.model if run.pipeline is None else run.pipeline).train(mode)


def _sum_and_count(run: Run, micro_batches: Sequence[tuple[Batch, Target]]) -> Tensor:
    """Return the summed loss of micro-batches and their count, fp64 [2]; zeros if another stage has the losses."""
    inputs, targets = zip(*micro_batches, strict=True)
    if run.pipeline is not None:
        losses_of_batches = run.pipeline.forward(inputs)  # none but on the last stage
    else:
        losses_of_batches = [as_model_output(run.model(**batch)).losses for batch in inputs]
    totals = torch.zeros(2, dtype=torch.float64, device=targets[0].num_tokens.device)
    for losses, target in zip(losses_of_batches, targets, strict=False):
        totals += torch.stack([target.sum(losses), target.num_tokens])
    return totals


def validate(run: Run, batches: Iterator[Batch] | None, signals: StopSignals, data_set: str | None = None) -> bool:
    """Evaluate on the validation data, if there are any; return False if a signal cut that short.

    data_set: "validation" for the evaluation after training. If the loss is not finite it raises NotFiniteError there,
    and prints a note at others.
    """
    if batches is None:
        return True
    evaluated = _evaluate_and_print(run, batches, signals, data_set)
    # Cut short or not, later evaluations keep their samples.
    run.counters.consumed_valid_samples += run.samples_of_evaluation
    if evaluated is not None:
        metrics = validation_metrics({run.loss.name: evaluated.loss}, run.settings.logging)
        run.writers.write(metrics, run.counters.iteration, run.counters.consumed_train_samples)
        _check_finite(run, evaluated, data_set)
    return evaluated is not None


def test(run: Run, signals: StopSignals) -> bool:
    """Evaluate on the test data, if there are any; return False if a signal cut that short.

    Raises NotFiniteError if the loss is not finite.
    """
    batches = batches_of(run, "test", 0)
    if batches is None:
        return True
    evaluated = _evaluate_and_print(run, batches, signals, "test")
    if evaluated is not None:
        _check_finite(run, evaluated, "test")
    return evaluated is not None


def evaluate_tasks(run: Run, signals: StopSignals) -> bool:
    """Evaluate on the tasks of ``--eval-tasks``, if there are any, and report the scores. All ranks share the work.

    Returns False if a signal cut that short.
    """
    if run.tasks is None:
        return True
    from megatron_zpp.integrations.lm_eval import EvaluationStopped, ShardedLM

    training, iteration = run.settings.training, run.counters.iteration
    model = ShardedLM(
        run.model,
        find_tokenizer(run.settings.tokenizer),
        length=training.seq_length,
        batch_size=training.micro_batch_size,
        device=run.device,
        stop=signals.agree,
    )
    scores = None
    _set_training(run, False)
    with ExitStack() as stack:
        if run.zeropp is not None:
            stack.enter_context(run.zeropp.traffic.evaluating())
            stack.enter_context(run.zeropp.resident_weights())
        stack.enter_context(run.token_traffic.evaluating())
        with suppress(EvaluationStopped):
            scores = run.tasks.evaluate(model)
    _set_training(run, True)
    if scores is None:
        print_once(f"note: the evaluation of tasks at iteration {iteration} was cut short: a signal asked to stop")
        return False
    run.writers.write(scores, iteration, run.counters.consumed_train_samples)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(format_scores_line(iteration, scores), flush=True)
    if (found := nonfinite_anywhere(run)) is not None:
        print_once(f"note: the scores at iteration {iteration} are of a model with NaN or Inf in {found}")
    return True


def _evaluate_and_print(
    run: Run, batches: Iterator[Batch], signals: StopSignals, data_set: str | None
) -> Evaluated | None:
    iteration = run.counters.iteration
    evaluated = evaluate(run, batches, run.plan.num_eval_micro_batches, stop=signals.agree)
    where = f"on the {data_set} set" if data_set else f"at iteration {iteration}"
    if evaluated is None:
        print_once(f"note: the evaluation {where} was cut short: a signal asked to stop")
    elif dist.get_rank() == dist.get_world_size() - 1:
        lines = format_validation_lines(iteration, {run.loss.name: evaluated.loss}, data_set)
        print(*lines, sep="\n", flush=True)
    return evaluated


def _check_finite(run: Run, evaluated: Evaluated, data_set: str | None) -> None:
    if math.isfinite(evaluated.loss):
        return
    why = "the parameters are finite: look at the data, or lower --lr"
    if evaluated.nonfinite is not None:
        why = f"NaN or Inf is in {evaluated.nonfinite}: go back to an older checkpoint with --ckpt-step"
    loss = f"the loss on the {data_set or 'validation'} set is {evaluated.loss:g}"
    wrong = f"{loss} after iteration {run.counters.iteration}, and {why}"
    if data_set is not None:
        raise NotFiniteError(wrong)
    print_once(f"note: {wrong}")
