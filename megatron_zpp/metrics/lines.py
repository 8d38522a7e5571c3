"""Megatron's log lines, from the state of training that they report."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

HOPS = ("weights", "gradients/intra", "gradients/inter")  # the log line shows their quantization errors


def _field(text: str, key: str | None = None, factor: float = 1, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field: its text in the log line, which shows value * factor, and its TensorBoard and wandb key."""
    return dataclasses.field(default=default, metadata={"text": text, "key": key, "factor": factor})


def _megabytes(links: str, key: str) -> Any:
    return _field(f"{links} per step (MB): {{:.3f}}", f"comm/{key}", 1e-6, None)


def _milliseconds(links: str) -> Any:
    return _field(f"waited {links} nodes per step (ms): {{:.1f}}", f"comm/seconds-waited-{links}-nodes", 1000, None)


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The state of training after an iteration, in the order of the log line, which leaves out what is None."""

    train_iters: int
    iteration: int = _field("iteration {:8d}/{report.train_iters:8d}")
    consumed_samples: int = _field("consumed samples: {:12d}")
    seconds_per_iteration: float | None = _field(
        "elapsed time per iteration (ms): {:.1f}", "iteration-time", 1000, None
    )
    tflops_per_device: float | None = _field("throughput per GPU (TFLOP/s/GPU): {:#.4g}", "throughput", default=None)
    learning_rate: float = _field("learning rate: {:.6E}", "learning-rate")  # the next step's, as in Megatron
    global_batch_size: int = _field("global batch size: {:5d}", "batch-size")
    losses: Mapping[str, float]  # by name, such as "lm loss"; in the line, means over the interval's counted steps
    loss_scale: float = _field("loss scale: {:.1f}", "loss-scale")
    grad_norm: float | None = _field("grad norm: {:.3f}", "grad-norm", default=None)
    num_zeros: int | None = _field("num zeros: {}", "num-zeros", default=None)
    params_norm: float | None = _field("params norm: {:.3f}", "params-norm", default=None)
    skipped_iterations: int = _field("number of skipped iterations: {:3d}", default=0)
    nan_iterations: int = _field("number of nan iterations: {:3d}", default=0)
    # Megatron's fields end here.
    tokens_per_second: float | None = _field("tokens per second: {:.0f}", "tokens-per-second", default=None)
    mfu: float | None = _field("MFU: {:.2%}", "mfu", default=None)  # 0 to 1
    eta_seconds: float | None = None
    # Bytes that all ranks send in a step, and seconds that a rank waits, a mean over ranks.
    bytes_between_nodes: float | None = _megabytes("sent between nodes", "bytes-between-nodes")
    bytes_within_nodes: float | None = _megabytes("sent within nodes", "bytes-within-nodes")
    bytes_between_islands: float | None = _megabytes("sent between islands", "bytes-between-islands")
    token_bytes_between_nodes: float | None = _megabytes("tokens sent between nodes", "token-bytes-between-nodes")
    token_bytes_within_nodes: float | None = _megabytes("tokens sent within nodes", "token-bytes-within-nodes")
    waited_between_nodes: float | None = _milliseconds("between")
    waited_within_nodes: float | None = _milliseconds("within")
    quantization_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # ZeroPP.quantization_errors


def format_training_line(report: TrainingReport, now: datetime | None = None) -> str:
    """Format Megatron's training log line, then our fields, all as ``name: value |`` for parsers of Megatron's logs."""
    now = datetime.now() if now is None else now
    shown = []
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if field.name == "losses":
            shown += [f"{name}: {loss:.6E}" for name, loss in value.items()]
        elif field.name == "quantization_errors":
            shown += [f"error of {hop}: {value[key]:.4f}" for hop in HOPS if (key := f"error/{hop}") in value]
        elif field.name == "eta_seconds" and value is not None:
            shown.append(f"ETA: {format_duration(value)}")
        elif field.metadata and value is not None:
            shown.append(field.metadata["text"].format(value * field.metadata["factor"], report=report))
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " ".join(f"{text} |" for text in shown)


def format_short_line(report: TrainingReport) -> str:
    """Format a training line in about 120 characters, for a terminal."""
    # Bytes between nodes, or within the node where nothing crosses nodes.
    between = bool(report.bytes_between_nodes)
    sent, where = (
        (report.bytes_between_nodes, "between nodes") if between else (report.bytes_within_nodes, "within the node")
    )
    fields = [
        f"  step {report.iteration:5d}/{report.train_iters}",
        f"loss {report.losses.get('lm loss', math.nan):.3f}",
        f"lr {report.learning_rate:.2e}",
        f"norm {report.grad_norm:.3f}" if report.grad_norm is not None else None,
        f"{report.tokens_per_second or 0:8,.0f} tokens/s",
        f"{sent / 1e6:7.2f} MB {where} per step" if sent else None,
        f"{report.skipped_iterations} steps skipped" if report.skipped_iterations else None,
        f"{format_duration(report.eta_seconds or 0)} left",
    ]
    return "   ".join(field for field in fields if field is not None)


def format_validation_lines(iteration: int, losses: Mapping[str, float], data_set: str | None = None) -> list[str]:
    """Format Megatron's three lines of an evaluation. data_set: "validation" or "test" for those after training."""
    where = f"iteration {iteration}" + (f" on {data_set} set" if data_set else "")
    line = f" validation loss at {where} | " + "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items()
    )
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def format_scores_line(iteration: int, scores: Mapping[str, float]) -> str:
    """Format the scores on tasks after an iteration, by their TensorBoard keys."""
    return f" scores at iteration {iteration} | " + "".join(f"{key}: {score:.6f} | " for key, score in scores.items())


def perplexity(loss: float) -> float:
    """Return exp(loss), capped at exp(20) as in Megatron; NaN stays NaN."""
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def format_duration(seconds: float) -> str:
    """Format as ``1:02:03``, from a day on as ``2d 01:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02d}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"
