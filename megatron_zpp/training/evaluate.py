"""Compute the loss on validation and test data, and scores on tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

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
from megatron_zpp.training.loss import Target, count_once, no_loss
from megatron_zpp.training.nonfinite import NotFiniteError, nonfinite_anywhere
from megatron_zpp.training.trainer import Callback, StepStats, Trainer

if TYPE_CHECKING:
    from megatron_zpp.integrations.lm_eval import Tasks


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    loss: float  # mean per token, without auxiliary losses
    nonfinite: str | None  # where the model has NaN or Inf, looked for if the loss is not finite


@torch.no_grad()
def evaluate(
    trainer: Trainer, batches: Iterator[Batch], num_micro_batches: int, stop: Callable[[], bool] = lambda: False
) -> Evaluated | None:
    """Evaluate on ``num_micro_batches`` of every data-parallel rank.

    ``stop`` is asked before each batch, and must answer the same on all ranks: True ends the evaluation, which then
    returns None. The model ends in training mode.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=trainer.device)  # loss, tokens
    at_once = trainer.mesh.pp_size  # a pipeline is full when it has as many micro-batches as ranks
    _set_training(trainer, False)
    try:
        with ExitStack() as stack:
            advance = stack.enter_context(progress("evaluating", num_micro_batches))
            stack.enter_context(trainer.islands.outer_parameters())
            # Keep the evaluation out of the log's bytes, but for what it gathers in the next training step's stead.
            if trainer.zeropp is not None:
                stack.enter_context(trainer.zeropp.traffic.evaluating())
            stack.enter_context(trainer.token_traffic.evaluating())
            for start in range(0, num_micro_batches, at_once):
                if stop():
                    return None
                count = min(at_once, num_micro_batches - start)
                totals += _sum_and_count(trainer, [trainer.loss.split(next(batches)) for _ in range(count)])
                advance(count)
            dist.all_reduce(count_once(trainer.mesh, totals))
            loss_sum, num_tokens = totals.tolist()
            if num_tokens == 0:
                print_once(f"WARNING: {no_loss('this evaluation')}")
            loss = loss_sum / max(1.0, num_tokens)
            return Evaluated(loss, None if math.isfinite(loss) else nonfinite_anywhere(trainer))
    finally:
        _set_training(trainer, True)


def _set_training(trainer: Trainer, mode: bool) -> None:
    (trainer.model if trainer.pipeline is None else trainer.pipeline).train(mode)


def _sum_and_count(trainer: Trainer, micro_batches: Sequence[tuple[Batch, Target]]) -> Tensor:
    """Return the summed loss of micro-batches and their count, fp64 [2]; zeros if another stage has the losses."""
    inputs, targets = zip(*micro_batches, strict=True)
    if trainer.pipeline is not None:
        losses_of_batches = trainer.pipeline.forward(inputs)  # none but on the last stage
    else:
        losses_of_batches = [as_model_output(trainer.model(**batch)).losses for batch in inputs]
    totals = torch.zeros(2, dtype=torch.float64, device=targets[0].num_tokens.device)
    for losses, target in zip(losses_of_batches, targets, strict=False):
        totals += torch.stack([target.sum(losses), target.num_tokens])
    return totals


class LossEvaluation(Callback):
    """Evaluates the loss on the validation data, and at the end on the test data, where there are any."""

    def __init__(self, trainer: Trainer, signals: StopSignals) -> None:
        self._trainer, self._signals = trainer, signals
        self._batches = batches_of(trainer, "valid", trainer.counters.consumed_valid_samples)

    def on_evaluate(self, is_last: bool) -> bool:
        """Print and write the loss. A loss that is not finite is a note; if ``is_last`` it raises NotFiniteError."""
        if not is_last:
            is_due = self._trainer.ends_interval(self._trainer.settings.training.eval_interval)
            return not is_due or self._validate(None)
        return self._validate("validation") and self._evaluate(batches_of(self._trainer, "test", 0), "test") is not None

    def _validate(self, data_set: str | None) -> bool:
        trainer = self._trainer
        if self._batches is None:
            return True
        loss = self._evaluate(self._batches, data_set)
        # Cut short or not, later evaluations keep their samples.
        trainer.counters.consumed_valid_samples += trainer.samples_of_evaluation
        return loss is not None

    def _evaluate(self, batches: Iterator[Batch] | None, data_set: str | None) -> float | None:
        """Return the loss; 0 without data, None if a signal cut the evaluation short."""
        trainer, iteration = self._trainer, self._trainer.counters.iteration
        if batches is None:
            return 0.0
        evaluated = evaluate(trainer, batches, trainer.plan.num_eval_micro_batches, stop=self._signals.agree)
        if evaluated is None:
            where = f"on the {data_set} set" if data_set else f"at iteration {iteration}"
            print_once(f"note: the evaluation {where} was cut short: a signal asked to stop")
            return None
        losses = {trainer.loss.name: evaluated.loss}
        if dist.get_rank() == dist.get_world_size() - 1:
            print(*format_validation_lines(iteration, losses, data_set), sep="\n", flush=True)
        if data_set != "test":
            metrics = validation_metrics(losses)
            trainer.writers.write(metrics, iteration, trainer.counters.consumed_train_samples)
        if not math.isfinite(evaluated.loss):
            why = "the parameters are finite: look at the data, or lower --lr"
            if evaluated.nonfinite is not None:
                why = f"NaN or Inf is in {evaluated.nonfinite}: go back to an older checkpoint with --ckpt-step"
            loss = f"the loss on the {data_set or 'validation'} set is {evaluated.loss:g}"
            wrong = f"{loss} after iteration {iteration}, and {why}"
            if data_set is not None:
                raise NotFiniteError(wrong)
            print_once(f"note: {wrong}")
        return evaluated.loss


class TaskEvaluation(Callback):
    """Evaluates on the tasks of ``--eval-tasks``, and reports the scores. All ranks share the work."""

    def __init__(self, trainer: Trainer, signals: StopSignals, tasks: Tasks) -> None:
        self._trainer, self._signals, self._tasks, self._should_stop = trainer, signals, tasks, False

    def on_step(self, stats: StepStats) -> None:
        self._should_stop = stats.should_stop

    def on_evaluate(self, is_last: bool) -> bool:
        """Evaluate where the interval ends, but not in a run that was asked to stop: tasks may take an hour."""
        from megatron_zpp.integrations.lm_eval import EvaluationStopped, ShardedLM

        trainer, training, iteration = self._trainer, self._trainer.settings.training, self._trainer.counters.iteration
        if not is_last and (self._should_stop or not trainer.ends_interval(training.eval_tasks_interval)):
            return True
        tokenizer = find_tokenizer(trainer.settings.tokenizer)
        model = ShardedLM(
            trainer.model,
            tokenizer,
            vocab_size=trainer.model.config.vocab_size if trainer.plan.unpadded_vocabulary else None,
            length=training.seq_length,
            batch_size=training.micro_batch_size,
            device=trainer.device,
            stop=self._signals.agree,
        )
        scores = None
        _set_training(trainer, False)
        with ExitStack() as stack:
            if trainer.zeropp is not None:
                stack.enter_context(trainer.zeropp.traffic.evaluating())
                stack.enter_context(trainer.zeropp.resident_weights())
            stack.enter_context(trainer.token_traffic.evaluating())
            with suppress(EvaluationStopped):
                scores = self._tasks.evaluate(model)
        _set_training(trainer, True)
        if scores is None:
            print_once(f"note: the evaluation of tasks at iteration {iteration} was cut short: a signal asked to stop")
            return False
        trainer.writers.write(scores, iteration, trainer.counters.consumed_train_samples)
        if dist.get_rank() == dist.get_world_size() - 1:
            print(format_scores_line(iteration, scores), flush=True)
        if (found := nonfinite_anywhere(trainer)) is not None:
            print_once(f"note: the scores at iteration {iteration} are of a model with NaN or Inf in {found}")
        return True
