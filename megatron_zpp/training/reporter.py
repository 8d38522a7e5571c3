"""Turn steps into log lines and points of metrics."""

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch
import torch.distributed as dist

from megatron_zpp.metrics.lines import TrainingReport, format_short_line, format_training_line
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.throughput import describe_mfu, mfu, model_tflops, peak_tflops, synchronize
from megatron_zpp.metrics.writers import training_metrics
from megatron_zpp.optim.gradients import params_norm
from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.loss import no_loss
from megatron_zpp.training.trainer import Callback, StepStats, Trainer
from megatron_zpp.zeropp import Traffic


class Reporter(Callback):
    """Collects what happened since the last log line."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "CPU"
        given = trainer.settings.logging.peak_tflops
        self.peak = given if given is not None else peak_tflops(name)
        print_once(describe_mfu(name, self.peak, given=given is not None))
        self.is_first_step, self.noted_no_loss = True, False
        self._start = 0.0  # when the stretch of training at hand began
        self._resume()
        self._clear()

    def _clear(self) -> None:
        # Sums and numbers of losses, by name, of the steps that moved parameters.
        self.losses: dict[str, list[float]] = {}
        self.num_steps = self.num_tokens = self.skipped = self.nan = 0
        self.flops = 0.0
        self.seconds = 0.0
        self.sent, self.sent_for_tokens = Traffic(), Traffic()
        self.waited = [0.0, 0.0]  # seconds, for links within nodes and between nodes

    def on_step(self, stats: StepStats) -> None:
        """Add one step, after the counters moved; print and write what is due."""
        trainer, iteration = self.trainer, self.trainer.counters.iteration
        self.is_first_step = False
        self.num_steps += 1
        length = trainer.sample_length(iteration)
        self.num_tokens += stats.num_samples * length
        self.flops += stats.num_samples * length * trainer.architecture.flops_per_token(trainer.model.config, length)
        self.skipped += stats.is_skipped
        self.nan += not math.isfinite(stats.loss)
        for name, loss in stats.losses(trainer.loss.name).items():
            total, count = self.losses.get(name, (0.0, 0))
            self.losses[name] = [total, count] if stats.is_skipped else [total + loss, count + 1]
        if stats.num_tokens == 0 and not self.noted_no_loss:
            self.noted_no_loss = True
            print_once(f"WARNING: {no_loss(f'iteration {iteration}')} (said once)")
        if stats.has_spiked:
            print_once(f"note: the loss at iteration {iteration} spiked to {stats.loss:g}: step skipped")
        if trainer.zeropp is not None:
            self.sent.add(*trainer.zeropp.traffic.take().of_levels())
        self.sent_for_tokens.add(*trainer.token_traffic.take().of_levels())
        is_log_step = trainer.actions().log
        report = self._step_report(stats)
        interval = self._interval_report(report) if is_log_step else None
        if interval is not None and dist.get_rank() == dist.get_world_size() - 1:
            print(format_short_line(interval) if sys.stdout.isatty() else format_training_line(interval), flush=True)
        self._write_point(report, interval)
        if is_log_step:
            self._clear()

    def show_compiling(self) -> AbstractContextManager[object]:
        """Show, around the first step, that it compiles the model."""
        compiles = self.trainer.settings.activation.compile and self.is_first_step
        return progress("compiling") if compiles else nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation or a saving out of the times of training."""
        self.seconds += self._lap()
        self.add_waits()
        yield
        self._resume()

    def _lap(self) -> float:
        """Return the seconds since the last call, including the device's queued work."""
        synchronize(self.trainer.device)
        begin, self._start = self._start, perf_counter()
        return self._start - begin

    def add_waits(self) -> tuple[float, float]:
        """Add what was waited for links since the last call to the interval's, and return it, in seconds."""
        waits = self.trainer.zeropp.waits if self.trainer.zeropp is not None else None
        waited = waits.take_seconds() if waits is not None else (0.0, 0.0)
        self.waited = [so_far + more for so_far, more in zip(self.waited, waited, strict=True)]
        return waited

    def _resume(self) -> None:
        if self.trainer.zeropp is not None and self.trainer.zeropp.waits is not None:
            self.trainer.zeropp.waits.take_seconds()  # not training's
        self._lap()

    def _interval_report(self, report: TrainingReport) -> TrainingReport:
        """Complete the last step's report by what the interval's steps add up to, on all ranks. Collective."""
        trainer, logging, world_size = self.trainer, self.trainer.settings.logging, dist.get_world_size()
        self.seconds += self._lap()
        self.add_waits()
        seconds = self.seconds / self.num_steps
        tokens_per_second = self.num_tokens / self.seconds
        per_device, flops_per_token = tokens_per_second / world_size, self.flops / self.num_tokens
        sums = [*self.sent.of_levels(), *self.sent_for_tokens.of_levels(), *self.waited, self.skipped, self.nan]
        losses = [number for total_and_count in self.losses.values() for number in total_and_count]
        totals = torch.tensor([*sums, *losses], dtype=torch.float64, device=trainer.device)
        dist.all_reduce(totals)
        *sent, waited_within, waited_between = (totals[:8] / self.num_steps).tolist()
        within_nodes, between_nodes, farthest, tokens_within_nodes, tokens_between_nodes, _ = sent
        # The ranks that took a step together count the same.
        skipped, nan, *losses = (totals[8:] / dist.get_world_size(trainer.mesh.step_group)).tolist()
        named = zip(self.losses, losses[::2], losses[1::2], strict=True)
        parameters, group = list(trainer.model.parameters()), trainer.mesh.step_group
        waits = trainer.zeropp is not None and trainer.zeropp.waits is not None and world_size > 1
        sends_tokens = trainer.mesh.ep_size > 1
        return dataclasses.replace(
            report,
            losses={name: total / count for name, total, count in named if count > 0},
            grad_norm=report.grad_norm if math.isfinite(report.grad_norm or 0.0) else None,
            params_norm=params_norm(parameters, trainer.copies, group) if logging.log_params_norm else None,
            skipped_iterations=round(skipped),
            nan_iterations=round(nan),
            seconds_per_iteration=seconds,
            tflops_per_device=model_tflops(per_device, flops_per_token) if logging.log_throughput else None,
            tokens_per_second=tokens_per_second,
            mfu=mfu(per_device, flops_per_token, self.peak),
            eta_seconds=seconds * (trainer.train_iters - report.iteration),
            bytes_between_nodes=between_nodes if trainer.zeropp is not None else None,
            bytes_within_nodes=within_nodes if trainer.zeropp is not None else None,
            bytes_between_islands=farthest if trainer.islands.num_islands > 1 else None,
            token_bytes_between_nodes=tokens_between_nodes if sends_tokens else None,
            token_bytes_within_nodes=tokens_within_nodes if sends_tokens else None,
            waited_between_nodes=waited_between / world_size if waits else None,
            waited_within_nodes=waited_within / world_size if waits else None,
            quantization_errors=trainer.zeropp.quantization_errors() if trainer.zeropp is not None else {},
        )

    def _step_report(self, stats: StepStats) -> TrainingReport:
        trainer, counters = self.trainer, self.trainer.counters
        assert trainer.schedule is not None  # it trains
        return TrainingReport(
            iteration=counters.iteration,
            train_iters=trainer.train_iters,
            consumed_samples=counters.consumed_train_samples,
            learning_rate=trainer.schedule.lr(trainer.scheduled_samples()),
            global_batch_size=stats.num_samples,
            losses=stats.losses(trainer.loss.name),
            loss_scale=trainer.scaler.scale,
            grad_norm=stats.grad_norm,
            num_zeros=stats.num_zeros,
        )

    def _write_point(self, report: TrainingReport, interval: TrainingReport | None) -> None:
        """Write the step's values, and the interval's for what a step does not have."""
        trainer = self.trainer
        metrics = training_metrics(report) | {"world-size": dist.get_world_size(), "tokens": trainer.tokens()}
        if interval is not None:
            metrics = training_metrics(interval) | metrics
        if trainer.device.type == "cuda" and trainer.writers.writes_points:
            memory = torch.cuda.memory_stats(trainer.device)
            metrics["mem-reserved-bytes"] = memory["reserved_bytes.all.current"]
            metrics["mem-allocated-bytes"] = memory["allocated_bytes.all.current"]
            metrics["mem-max-allocated-bytes"] = memory["allocated_bytes.all.peak"]
            metrics["mem-allocated-count"] = memory["allocation.all.current"]
        trainer.writers.write(metrics, report.iteration, report.consumed_samples)
