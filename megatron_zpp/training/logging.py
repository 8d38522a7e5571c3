"""What a run reports: Megatron's log lines, TensorBoard and wandb points, and progress bars on a terminal."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch.distributed as dist

from megatron_zpp.training.dashboard import tensorboard_layout
from megatron_zpp.training.settings import LoggingSettings
from megatron_zpp.training.throughput import format_duration

HOPS = ("weights", "gradients/intra", "gradients/inter")  # whose quantization errors the line shows


@dataclass(frozen=True)
class TrainingReport:
    """The state of training after an iteration. None: not measured, left out."""

    iteration: int
    train_iters: int
    consumed_samples: int
    learning_rate: float  # of the next step, as in Megatron
    global_batch_size: int
    losses: Mapping[str, float]  # by name, such as "lm loss"; the line's are means over the interval
    loss_scale: float
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    skipped_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    seconds_per_iteration: float | None = None
    tflops_per_device: float | None = None  # with --log-throughput
    tokens_per_second: float | None = None  # of all ranks
    mfu: float | None = None  # 0 to 1
    eta_seconds: float | None = None
    bytes_between_nodes: float | None = None  # sent per step, all ranks
    bytes_within_nodes: float | None = None
    quantization_errors: Mapping[str, float] = field(default_factory=dict)  # of ZeroPP.quantization_errors


def format_training_line(report: TrainingReport, now: datetime | None = None) -> str:
    """Megatron's training log line, then fields of our own: scripts that parse Megatron's logs read it unchanged.

    Every field is ``name: value`` and closed by `` |``. Fields that are None are left out.
    """
    now = datetime.now() if now is None else now
    r = report
    fields: list[str | None] = [
        f"iteration {r.iteration:8d}/{r.train_iters:8d}",
        f"consumed samples: {r.consumed_samples:12d}",
        f"skipped samples: {r.skipped_samples:12d}" if r.skipped_samples > 0 else None,
        _field("elapsed time per iteration (ms): {:.1f}", r.seconds_per_iteration, factor=1000),
        _field("throughput per GPU (TFLOP/s/GPU): {:.1f}", r.tflops_per_device),
        f"learning rate: {r.learning_rate:.6E}",
        f"global batch size: {r.global_batch_size:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in r.losses.items()),
        f"loss scale: {r.loss_scale:.1f}",
        _field("grad norm: {:.3f}", r.grad_norm),
        _field("num zeros: {}", r.num_zeros),
        _field("params norm: {:.3f}", r.params_norm),
        f"number of skipped iterations: {r.skipped_iterations:3d}",
        f"number of nan iterations: {r.nan_iterations:3d}",
        # Ours from here on.
        _field("tokens per second: {:.0f}", r.tokens_per_second),
        _field("MFU: {:.2%}", r.mfu),
        None if r.eta_seconds is None else f"ETA: {format_duration(r.eta_seconds)}",
        _field("sent between nodes per step (MB): {:.3f}", r.bytes_between_nodes, factor=1e-6),
        _field("sent within nodes per step (MB): {:.3f}", r.bytes_within_nodes, factor=1e-6),
        *(_field(f"error of {hop}: {{:.4f}}", r.quantization_errors.get(f"error/{hop}")) for hop in HOPS),
    ]
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " ".join(f"{field} |" for field in fields if field is not None)


def format_validation_lines(iteration: int, losses: Mapping[str, float], data_set: str | None = None) -> list[str]:
    """Megatron's three lines of an evaluation: a rule, loss and perplexity, a rule.

    ``data_set``: ``"validation"`` or ``"test"`` for the evaluations after training; None during it.
    """
    where = f"iteration {iteration}" + (f" on {data_set} set" if data_set else "")
    line = f" validation loss at {where} | " + "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items()
    )
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as in Megatron; NaN stays NaN."""
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def training_metrics(report: TrainingReport, settings: LoggingSettings) -> dict[str, float]:
    """``report`` under Megatron's TensorBoard and wandb keys, with what ``settings`` asks for."""
    r = report
    metrics: dict[str, float | None] = {
        "learning-rate": r.learning_rate,
        "batch-size": r.global_batch_size,
        **r.losses,
        "loss-scale": r.loss_scale,
        "grad-norm": r.grad_norm,
        "num-zeros": r.num_zeros,
        "params-norm": r.params_norm,
        "skipped-train-samples": r.skipped_samples if r.skipped_samples > 0 else None,
        "tokens-per-second": r.tokens_per_second,
        "comm/bytes-between-nodes": r.bytes_between_nodes,
        "comm/bytes-within-nodes": r.bytes_within_nodes,
        **{f"comm/{name}": value for name, value in r.quantization_errors.items()},
    }
    if settings.log_timers_to_tensorboard:
        metrics |= {
            "iteration-time": r.seconds_per_iteration,
            "throughput": r.tflops_per_device,
            "mfu": r.mfu,
        }
    return {key: value for key, value in metrics.items() if value is not None}


def validation_metrics(losses: Mapping[str, float], settings: LoggingSettings) -> dict[str, float]:
    """Validation losses under Megatron's keys; perplexities with ``--log-validation-ppl-to-tensorboard``."""
    metrics = {f"{name} validation": loss for name, loss in losses.items()}
    if settings.log_validation_ppl_to_tensorboard:
        metrics |= {f"{name} validation ppl": perplexity(loss) for name, loss in losses.items()}
    return metrics


# Megatron draws these over iterations only; every other key over consumed samples too ("KEY vs samples").
_OVER_ITERATIONS_ONLY = ("iteration-time", "throughput", "tokens-per-second", "mfu", "skipped-train-samples")
_OVER_ITERATIONS_ONLY_PREFIXES = ("mem-", "comm/")


class MetricWriters:
    """TensorBoard (``--tensorboard-dir``) and wandb (``--wandb-project``), each where it was asked for.

    Build it on every rank, so that a missing package stops all of them alike; only the last rank writes. wandb's own
    environment decides how it runs: ``WANDB_MODE=offline`` keeps the points in ``--wandb-save-dir`` for ``wandb sync``.

    Args:
        settings: which writers, and where.
        run_config: every setting of the run, shown with it.
        is_writer: True on the one rank that writes.
        save: the run's checkpoint folder; wandb's default place is its subfolder ``wandb``.

    Raises:
        ValueError: a writer was asked for whose package is not installed.
    """

    def __init__(
        self, settings: LoggingSettings, run_config: Mapping[str, Any], *, is_writer: bool, save: str | None = None
    ) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if settings.tensorboard_dir is not None:
            _require("tensorboard", "--tensorboard-dir")
        if settings.wandb_project is not None:
            _require("wandb", "--wandb-project")
        if not is_writer:
            return
        if settings.tensorboard_dir is not None:
            # Imported here: it costs seconds, and most ranks write nothing.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(settings.tensorboard_dir, max_queue=settings.tensorboard_queue_size)
            for name, value in run_config.items():
                self._tensorboard.add_text(name, str(value))
            self._tensorboard.add_custom_scalars(tensorboard_layout())
        if settings.wandb_project is not None:
            import wandb

            folder = settings.wandb_save_dir or (os.path.join(save, "wandb") if save else None)
            if folder is not None:
                os.makedirs(folder, exist_ok=True)  # wandb falls back to a temporary folder otherwise
            self._wandb = wandb.init(
                project=settings.wandb_project,
                name=settings.wandb_exp_name,
                entity=settings.wandb_entity,
                dir=folder,
                config=dict(run_config),
            )

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point per key at ``iteration``; does nothing where there is no writer."""
        if self._tensorboard is not None:
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, iteration)
                if key not in _OVER_ITERATIONS_ONLY and not key.startswith(_OVER_ITERATIONS_ONLY_PREFIXES):
                    self._tensorboard.add_scalar(f"{key} vs samples", value, consumed_samples)
        if self._wandb is not None:
            self._wandb.log({**metrics, "samples vs steps": consumed_samples}, step=iteration)

    def close(self) -> None:
        """Write out everything and end the wandb run."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextmanager
def progress(
    description: str, total: int | None = None, *, any_rank: bool = False, line_every: float | None = None
) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr around a long step; yields ``advance(count)``.

    Only rank 0 shows it (or with ``any_rank`` whoever gets here), and only where stderr is a terminal: logs stay free
    of it, but for a line every ``line_every`` seconds. Without ``total``, a spinner with the elapsed time.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    shown = rank == 0 or any_rank
    if not shown or not sys.stderr.isatty():
        if shown and total is not None and line_every is not None:
            yield _line_printer(description, total, line_every)
        else:
            yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _line_printer(description: str, total: int, every: float) -> Callable[[int], None]:
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= every and done < total:
            last, left = now, (now - start) * (total - done) / max(done, 1)
            print(f"{description}: {100 * done / total:.0f} %, about {left:.0f} s left", file=sys.stderr, flush=True)

    return advance


def _field(template: str, value: float | None, factor: float = 1) -> str | None:
    if value is None:
        return None
    return template.format(value if factor == 1 else value * factor)


def _require(package: str, flag: str) -> None:
    # A mere folder of that name, such as wandb's own ./wandb, is found too, but has no origin. An extra of ours has the
    # package's name.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{flag} needs the package {package}: pip install 'megatron_zpp[{package}]'")
