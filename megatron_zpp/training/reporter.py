"""Turn steps into log lines and TensorBoard / wandb points."""

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from megatron_zpp.metrics.advice import Advice
from megatron_zpp.metrics.lines import TrainingReport, format_training_line
from megatron_zpp.metrics.log_reader import shorten
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.throughput import IntervalTimer, describe_mfu, mfu, model_tflops, peak_tflops
from megatron_zpp.metrics.writers import training_metrics
from megatron_zpp.optim.gradients import params_norm
from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.deferred_stats import StepResult
from megatron_zpp.training.run import Run, what_is_due
from megatron_zpp.training.stragglers import Stragglers
from megatron_zpp.zeropp import Traffic


class Reporter:
    """Collects what happened since the last log line."""

    def __init__(self, run: Run) -> None:
        self.run = run
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU"
        given = run.settings.logging.peak_tflops
        self.peak = given if given is not None else peak_tflops(name)
        print_once(describe_mfu(name, self.peak, given=given is not None))
        self.is_first_step = True
        self.timer = IntervalTimer(run.device)
        self.stragglers = Stragglers(run) if run.settings.logging.log_straggler else None
        self.advice = Advice(run.predicted)
        self._resume()
        self._clear()

    def _clear(self) -> None:
        self.losses: dict[str, list[float]] = {}  # by name, of the steps that moved parameters
        self.num_steps = self.num_tokens = self.skipped = self.nan = 0
        self.flops = 0.0
        self.seconds = 0.0
        self.sent, self.sent_for_tokens = Traffic(), Traffic()
        self.waited = [0.0, 0.0]  # seconds, for links within nodes and between nodes

    def step(self, results: Sequence[StepResult], num_samples: int) -> None:
        """Add one step; print and write what is due. Call it on every rank, after the counters moved.

        results: of the steps since islands last exchanged them; none if they did not after this step.
        """
        run, logging = self.run, self.run.settings.logging
        self.is_first_step = False
        self.num_steps += 1
        length = run.sample_length(run.counters.iteration)
        num_samples //= run.mesh.num_jobs  # of which this job has as many as others
        self.num_tokens += num_samples * length
        self.flops += num_samples * length * run.architecture.flops_per_token(run.model.config, length)
        for result in results:
            self.skipped += result.is_skipped
            self.nan += result.has_nan
            for name, loss in result.losses(run.loss.name).items() if result.has_stepped else ():
                self.losses.setdefault(name, []).append(loss)
        for zeropp in run.zeropps:
            self.sent.add(*zeropp.traffic.take().of_levels())
        if self.stragglers is not None:  # other runs look at the times that a GPU took only where they print a line
            self.stragglers.step(self._add_waits(), run.counters.iteration)
        self.sent.add(*run.islands.traffic.take().of_levels())
        self.sent_for_tokens.add(*run.token_traffic.take().of_levels())
        iteration = run.counters.iteration
        is_log_step = what_is_due(run.settings, iteration, run.train_iters).log
        points = [result for result in results if result.at.iteration % logging.tensorboard_log_interval == 0]
        interval = self._interval_report(results[-1]) if is_log_step else None
        if interval is not None and dist.get_rank() == dist.get_world_size() - 1:
            line = format_training_line(interval)
            print(shorten(line) if sys.stdout.isatty() else line, flush=True)
            between = interval.waited_between_nodes or 0.0
            advice = self.advice.after(self.num_steps, interval.seconds_per_iteration or 0.0, between)
            if advice is not None:
                print(advice, flush=True)
        for result in points:
            self._write_point(result, interval if result.at.iteration == iteration else None)
        if is_log_step:
            self._clear()
        if self.stragglers is not None and (is_log_step or points):
            self.stragglers.resume()  # ranks have waited for each other here

    def show_compiling(self) -> AbstractContextManager[object]:
        """Show, around the first step, that it compiles the model."""
        compiles = self.run.settings.activation.compile and self.is_first_step
        return progress("compiling") if compiles else nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation or a saving out of the times of training."""
        self.seconds += self.timer.restart()
        self._add_waits()
        yield
        self._resume()

    def _add_waits(self) -> tuple[float, float]:
        """Add what was waited for links since the last call to the interval's, and return it."""
        waits = self.run.zeropp.waits if self.run.zeropp is not None else None
        waited = waits.take() if waits is not None else (0.0, 0.0)
        self.waited = [so_far + more for so_far, more in zip(self.waited, waited, strict=True)]
        return waited

    def _resume(self) -> None:
        if self.run.zeropp is not None and self.run.zeropp.waits is not None:
            self.run.zeropp.waits.take()  # not training's
        if self.stragglers is not None:
            self.stragglers.resume()
        self.timer.restart()

    def _interval_report(self, result: StepResult) -> TrainingReport:
        run, logging = self.run, self.run.settings.logging
        self.seconds += self.timer.restart()
        self._add_waits()
        seconds = self.seconds / self.num_steps
        tokens_per_second = self.num_tokens / self.seconds
        per_device, flops_per_token = tokens_per_second / dist.get_world_size(), self.flops / self.num_tokens
        counts = [*self.sent.of_levels(), *self.sent_for_tokens.of_levels()]
        totals = torch.tensor([*counts, *self.waited], dtype=torch.float64, device=run.device)
        dist.all_reduce(totals)
        *sent, waited_within, waited_between = (totals / self.num_steps).tolist()
        within_nodes, between_nodes, between_islands, tokens_within_nodes, tokens_between_nodes, _ = sent
        waits = run.zeropp is not None and run.zeropp.waits is not None and dist.get_world_size() > 1
        sends_tokens = run.mesh.ep_size > 1
        return dataclasses.replace(
            self._step_report(result),
            losses={name: sum(losses) / len(losses) for name, losses in self.losses.items()},
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            params_norm=self._params_norm() if logging.log_params_norm else None,
            skipped_iterations=self.skipped,
            nan_iterations=self.nan,
            seconds_per_iteration=seconds,
            tflops_per_device=model_tflops(per_device, flops_per_token) if logging.log_throughput else None,
            tokens_per_second=tokens_per_second,
            mfu=mfu(per_device, flops_per_token, self.peak),
            eta_seconds=seconds * (run.train_iters - result.at.iteration),
            bytes_between_nodes=between_nodes if run.zeropp is not None else None,
            bytes_within_nodes=within_nodes if run.zeropp is not None else None,
            bytes_between_islands=between_islands if run.has_islands else None,
            island=run.mesh.job if run.elastic is not None else None,
            islands_there=run.elastic.num_islands if run.elastic is not None else None,
            token_bytes_between_nodes=tokens_between_nodes if sends_tokens else None,
            token_bytes_within_nodes=tokens_within_nodes if sends_tokens else None,
            waited_between_nodes=waited_between / dist.get_world_size() if waits else None,
            waited_within_nodes=waited_within / dist.get_world_size() if waits else None,
            # Of the last island, whose last rank writes the log.
            quantization_errors=[zeropp.quantization_errors() for zeropp in run.zeropps][-1] if run.zeropps else {},
        )

    def _step_report(self, result: StepResult) -> TrainingReport:
        return TrainingReport(
            iteration=result.at.iteration,
            train_iters=self.run.train_iters,
            consumed_samples=result.at.consumed_samples,
            learning_rate=result.at.learning_rate,
            global_batch_size=result.at.num_samples,
            losses=result.losses(self.run.loss.name),
            loss_scale=result.at.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
        )

    def _write_point(self, result: StepResult, interval: TrainingReport | None) -> None:
        """Write the step's values to TensorBoard and wandb, and the interval's for what a step does not have."""
        run, logging, at = self.run, self.run.settings.logging, result.at
        metrics = training_metrics(self._step_report(result), logging)
        if interval is not None:
            metrics = training_metrics(interval, logging) | metrics
        if logging.log_world_size_to_tensorboard:
            metrics["world-size"] = dist.get_world_size()
        if logging.log_memory_to_tensorboard and run.device.type == "cuda":
            memory = torch.cuda.memory_stats(run.device)
            metrics["mem-reserved-bytes"] = memory["reserved_bytes.all.current"]
            metrics["mem-allocated-bytes"] = memory["allocated_bytes.all.current"]
            metrics["mem-max-allocated-bytes"] = memory["allocated_bytes.all.peak"]
            metrics["mem-allocated-count"] = memory["allocation.all.current"]
        run.writers.write(metrics, at.iteration, at.consumed_samples)

    def _params_norm(self) -> float:
        """Return the norm of the parameters, the mean over islands. Collective."""
        run = self.run
        norms = [params_norm([*state.model.parameters()], run.copies, run.mesh.ranks_of_island) for state in run.states]
        total = torch.tensor(norms, device=run.device).sum(dim=0)
        if run.mesh.island.size() > 1:
            dist.all_reduce(total, group=run.mesh.island.get_group())
        return total.item() / run.mesh.num_islands
