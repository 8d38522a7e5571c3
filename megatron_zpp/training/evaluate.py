"""Compute the loss on validation and test data, and scores on tasks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

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
from megatron_zpp.training.nonfinite import NotFiniteError, nonfinite_evaluated
from megatron_zpp.training.run import Run, TrainState


@torch.no_grad()
def evaluate(
    run: Run, batches: Iterator[Batch], num_micro_batches: int, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Return the mean loss per token over ``num_micro_batches`` of every data-parallel rank, without auxiliary losses.

    Islands evaluate their outer parameters, each on its part of the data. ``stop`` is asked before each batch, and must
    answer alike on all ranks: True ends the evaluation, which then returns None. The model ends in training mode.
    """
    is_stopped = False
    totals = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    at_once = run.mesh.pp_size  # a pipeline is full when it has as many micro-batches as ranks
    _set_training(run, False)
    with ExitStack() as stack:
        advance = stack.enter_context(progress("evaluating", num_micro_batches))
        stack.enter_context(run.islands.outer_parameters())
        # Keep the evaluation out of the log's bytes, but for what it gathers in the next training step's stead.
        for zeropp in run.zeropps:
            stack.enter_context(zeropp.traffic.evaluating(own_weights=not run.has_islands))
        stack.enter_context(run.token_traffic.evaluating())
        for start in range(0, num_micro_batches, at_once):
            if is_stopped := stop():
                break
            count = min(at_once, num_micro_batches - start)
            for state in run.states:
                totals += _sum_and_count(state, [run.loss.split(next(batches)) for _ in range(count)])
            advance(count)
    dist.all_reduce(count_once(run.mesh, totals))
    _set_training(run, True)
    loss_sum, num_tokens = totals.tolist()
    if num_tokens == 0 and not is_stopped:
        print_once(f"WARNING: {no_loss('this evaluation')}")
    return None if is_stopped else mean_loss(loss_sum, num_tokens)


def _set_training(run: Run, mode: bool) -> None:
    for state in run.states:
        (state.model if state.pipeline is None else state.pipeline).train(mode)


def _sum_and_count(state: TrainState, micro_batches: Sequence[tuple[Batch, Target]]) -> Tensor:
    """Return the summed loss of micro-batches and their count, fp64 [2]; zeros if another stage has the losses."""
    inputs, targets = zip(*micro_batches, strict=True)
    if state.pipeline is not None:
        losses_of_batches = state.pipeline.forward(inputs)  # none but on the last stage
    else:
        losses_of_batches = [as_model_output(state.model(**batch)).losses for batch in inputs]
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
    loss = _evaluate_and_print(run, batches, signals, data_set)
    # Cut short or not, later evaluations keep their samples.
    run.counters.consumed_valid_samples += run.samples_of_evaluation
    if loss is not None:
        metrics = validation_metrics({run.loss.name: loss}, run.settings.logging)
        run.writers.write(metrics, run.counters.iteration, run.counters.consumed_train_samples)
        _check_finite(run, loss, data_set)
    return loss is not None


def test(run: Run, signals: StopSignals) -> bool:
    """Evaluate on the test data, if there are any; return False if a signal cut that short.

    Raises NotFiniteError if the loss is not finite.
    """
    batches = batches_of(run, "test", 0)
    if batches is None:
        return True
    loss = _evaluate_and_print(run, batches, signals, "test")
    if loss is not None:
        _check_finite(run, loss, "test")
    return loss is not None


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
        for zeropp in run.zeropps:
            stack.enter_context(zeropp.traffic.evaluating())
            stack.enter_context(zeropp.resident_weights())
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
    if (found := nonfinite_evaluated(run)) is not None:
        print_once(f"note: the scores at iteration {iteration} are of a model with NaN or Inf in {found}")
    return True


def _evaluate_and_print(run: Run, batches: Iterator[Batch], signals: StopSignals, data_set: str | None) -> float | None:
    iteration = run.counters.iteration
    loss = evaluate(run, batches, run.plan.num_eval_micro_batches, stop=signals.agree)
    where = f"on the {data_set} set" if data_set else f"at iteration {iteration}"
    if loss is None:
        print_once(f"note: the evaluation {where} was cut short: a signal asked to stop")
    elif dist.get_rank() == dist.get_world_size() - 1:
        print(*format_validation_lines(iteration, {run.loss.name: loss}, data_set), sep="\n", flush=True)
    return loss


def _check_finite(run: Run, loss: float, data_set: str | None) -> None:
    if math.isfinite(loss):
        return
    what, found = f"loss on the {data_set or 'validation'} set", nonfinite_evaluated(run)
    why = "the parameters are finite: look at the data, or lower --lr"
    if found is not None:
        why = f"NaN or Inf is in {found}: go back to an older checkpoint with --ckpt-step"
    wrong = f"the {what} is {loss:g} after iteration {run.counters.iteration}, and {why}"
    if data_set is not None:
        raise NotFiniteError(wrong)
    print_once(f"note: {wrong}")
