"""Megatron's log lines, from the state of training that they report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

HOPS = ("weights", "gradients/intra", "gradients/inter")  # whose quantization errors the line shows


@dataclass(frozen=True)
class TrainingReport:
    """The state of training after an iteration. None: not measured, left out."""

    iteration: int
    train_iters: int
    consumed_samples: int
    learning_rate: float  # of the next step, as in Megatron
    global_batch_size: int
    losses: Mapping[str, float]  # by name, such as "lm loss"; the line's are means over the interval's steps that count
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
    bytes_between_islands: float | None = None
    island: int | None = None  # whose job's line this is, where each island is a job of its own
    islands_there: int | None = None  # that agreed with it last
    token_bytes_between_nodes: float | None = None  # of tokens that are sent to experts, beside those
    token_bytes_within_nodes: float | None = None
    waited_between_nodes: float | None = None  # seconds per step that a rank waited for these links, mean over ranks
    waited_within_nodes: float | None = None
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
        _field("island: {}", r.island),
        _field("islands there: {}", r.islands_there),
        _field("tokens per second: {:.0f}", r.tokens_per_second),
        _field("MFU: {:.2%}", r.mfu),
        None if r.eta_seconds is None else f"ETA: {format_duration(r.eta_seconds)}",
        _field("sent between nodes per step (MB): {:.3f}", r.bytes_between_nodes, factor=1e-6),
        _field("sent within nodes per step (MB): {:.3f}", r.bytes_within_nodes, factor=1e-6),
        _field("sent between islands per step (MB): {:.3f}", r.bytes_between_islands, factor=1e-6),
        _field("tokens sent between nodes per step (MB): {:.3f}", r.token_bytes_between_nodes, factor=1e-6),
        _field("tokens sent within nodes per step (MB): {:.3f}", r.token_bytes_within_nodes, factor=1e-6),
        _field("waited between nodes per step (ms): {:.1f}", r.waited_between_nodes, factor=1000),
        _field("waited within nodes per step (ms): {:.1f}", r.waited_within_nodes, factor=1000),
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


def _field(template: str, value: float | None, factor: float = 1) -> str | None:
    if value is None:
        return None
    return template.format(value if factor == 1 else value * factor)


def format_duration(seconds: float) -> str:
    """``1:02:03``, with days in front where there are any: ``2d 01:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02d}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"
