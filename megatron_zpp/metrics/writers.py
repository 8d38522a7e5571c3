"""TensorBoard and wandb points under Megatron's keys."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.metrics.dashboard import tensorboard_layout
from megatron_zpp.metrics.lasting import Attempts
from megatron_zpp.metrics.lines import TrainingReport, perplexity
from megatron_zpp.settings.groups import LoggingSettings


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
        "comm/bytes-between-islands": r.bytes_between_islands,
        "comm/token-bytes-between-nodes": r.token_bytes_between_nodes,
        "comm/token-bytes-within-nodes": r.token_bytes_within_nodes,
        "comm/seconds-waited-between-nodes": r.waited_between_nodes,
        "comm/seconds-waited-within-nodes": r.waited_within_nodes,
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
        resumes: whether the run goes on from a checkpoint there, and so with its wandb run.

    Raises:
        ValueError: a writer was asked for whose package is not installed.
    """

    def __init__(
        self,
        settings: LoggingSettings,
        run_config: Mapping[str, Any],
        *,
        is_writer: bool,
        save: str | None = None,
        resumes: bool = False,
    ) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._to_tensorboard: Attempts | None = None
        self._to_wandb: Attempts | None = None
        if settings.tensorboard_dir is not None:
            _require("tensorboard", "--tensorboard-dir")
        if settings.wandb_project is not None:
            _require("wandb", "--wandb-project")
        if not is_writer:
            return
        self._run_config, self._settings = run_config, settings
        if settings.tensorboard_dir is not None:
            self._to_tensorboard = Attempts(f"TensorBoard's events in {settings.tensorboard_dir}")
            if not self._to_tensorboard(self._open_tensorboard):
                self._tensorboard = None
        if settings.wandb_project is not None:
            self._wandb_folder = settings.wandb_save_dir or (os.path.join(save, "wandb") if save else None)
            self._resumes_wandb = resumes
            self._to_wandb = Attempts(f"wandb's run in {self._wandb_folder or 'its own folder'}")
            self._to_wandb(self._open_wandb, OSError)  # a full disk; wandb's own errors, as of a login, end the run

    def _open_wandb(self) -> None:
        import wandb

        settings, folder, run_id = self._settings, self._wandb_folder, os.environ.get("WANDB_RUN_ID")
        if folder is not None:
            os.makedirs(folder, exist_ok=True)  # wandb falls back to a temporary folder otherwise
            id_of_last = Path(folder) / "run_id"
            if run_id is None and self._resumes_wandb and id_of_last.exists():
                run_id = id_of_last.read_text().strip()
        self._wandb = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_exp_name,
            entity=settings.wandb_entity,
            dir=folder,
            config=dict(self._run_config),
            id=run_id,
            resume="allow",  # goes on with the run of that id, if there is one
        )
        if folder is not None:
            id_of_last.write_text(f"{self._wandb.id}\n")

    def _open_tensorboard(self) -> None:
        # Imported here: it costs seconds, and most ranks write nothing.
        from torch.utils.tensorboard import SummaryWriter

        settings = self._settings
        self._tensorboard = SummaryWriter(settings.tensorboard_dir, max_queue=settings.tensorboard_queue_size)
        for name, value in self._run_config.items():
            self._tensorboard.add_text(name, str(value))
        self._tensorboard.add_custom_scalars(tensorboard_layout())

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point per key at ``iteration``; does nothing where there is no writer."""

        def to_tensorboard() -> None:
            if self._tensorboard is None:
                self._open_tensorboard()
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, iteration)
                if key not in _OVER_ITERATIONS_ONLY and not key.startswith(_OVER_ITERATIONS_ONLY_PREFIXES):
                    self._tensorboard.add_scalar(f"{key} vs samples", value, consumed_samples)

        if self._to_tensorboard is not None and not self._to_tensorboard(to_tensorboard):
            self._tensorboard = None  # its thread has ended: another one begins a file of its own

        def to_wandb() -> None:
            if self._wandb is None:
                self._open_wandb()
            self._wandb.log({**metrics, "samples vs steps": consumed_samples}, step=iteration)

        if self._to_wandb is not None:
            self._to_wandb(to_wandb)

    def close(self) -> None:
        """Write out everything and end the wandb run."""
        if self._to_tensorboard is not None and self._tensorboard is not None:
            self._to_tensorboard(self._tensorboard.close)
        if self._to_wandb is not None and self._wandb is not None:
            self._to_wandb(self._wandb.finish)


def _require(package: str, flag: str) -> None:
    # A mere folder of that name, such as wandb's own ./wandb, is found too, but has no origin. An extra of ours has the
    # package's name.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"{flag} needs the package {package}: pip install {package}, or megatron_zpp's extra {package}"
        )
