"""TensorBoard and wandb points under Megatron's keys, and what both keep about the program."""

import dataclasses
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_zpp.metrics.lasting import Attempts
from megatron_zpp.metrics.lines import TrainingReport, perplexity
from megatron_zpp.metrics.tensorboard_reader import tensorboard_layout
from megatron_zpp.settings.groups import LoggingSettings

# Megatron draws these over iterations only; every other key over consumed samples too ("KEY vs samples").
OVER_ITERATIONS_ONLY = (
    "iteration-time",
    "throughput",
    "mfu",
    "tokens-per-second",
    "mem-",
    "comm/",
)  # beginnings of keys


def training_metrics(report: TrainingReport) -> dict[str, float]:
    """Return the values of ``report`` by Megatron's TensorBoard and wandb keys."""
    errors = {f"comm/{name}": value for name, value in report.quantization_errors.items()}
    keys = {field.name: field.metadata.get("key") for field in dataclasses.fields(report)}
    values = {key: getattr(report, name) for name, key in keys.items() if key is not None}
    return {**report.losses, **errors} | {key: value for key, value in values.items() if value is not None}


def validation_metrics(losses: Mapping[str, float]) -> dict[str, float]:
    """Return validation losses and perplexities by Megatron's keys."""
    metrics = {f"{name} validation": loss for name, loss in losses.items()}
    return metrics | {f"{name} validation ppl": perplexity(loss) for name, loss in losses.items()}


def check_writers(settings: LoggingSettings) -> None:
    """Raise ValueError if a package is missing that the flags need."""
    wanted = {"tensorboard": settings.tensorboard_dir, "wandb": settings.wandb_project}
    for package, flag in (("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project")):
        spec = importlib.util.find_spec(package)
        # A folder of that name, such as wandb's ./wandb, has no origin.
        if wanted[package] is not None and (spec is None or spec.origin is None):
            raise ValueError(f"{flag} needs the package {package}, of megatron_zpp's extra {package}")


class MetricWriters:
    """TensorBoard (``--tensorboard-dir``) and wandb (``--wandb-project``), each where it was asked for.

    Build it on every rank, so that a missing package stops all of them alike; only ``is_writer``'s writes.
    ``run_config`` is shown with the run. ``save``: the run's checkpoint folder, in which wandb has a folder by default;
    ``resumes``: whether the run goes on from a checkpoint there, and so with its wandb run. Raises ValueError for a
    missing package.
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
        self._run_config, self._settings, self._resumes = run_config, settings, resumes
        self._wandb_folder = settings.wandb_save_dir or (os.path.join(save, "wandb") if save else None)
        check_writers(settings)
        if is_writer and settings.tensorboard_dir is not None:
            self._to_tensorboard = Attempts(f"TensorBoard's events in {settings.tensorboard_dir}")
            if not self._to_tensorboard(self._open_tensorboard):
                self._tensorboard = None
        if is_writer and settings.wandb_project is not None:
            self._to_wandb = Attempts(f"wandb's run in {self._wandb_folder or 'its own folder'}")
            self._to_wandb(self._open_wandb, OSError)  # a full disk; other errors, such as a failed login, end the run

    def _open_wandb(self) -> None:
        import wandb

        settings, folder, run_id = self._settings, self._wandb_folder, os.environ.get("WANDB_RUN_ID")
        if folder is not None:
            os.makedirs(folder, exist_ok=True)  # wandb falls back to a temporary folder otherwise
            id_of_last = Path(folder) / "run_id"
            if run_id is None and self._resumes and id_of_last.exists():
                run_id = id_of_last.read_text().strip()
        try:
            self._wandb = wandb.init(
                project=settings.wandb_project,
                name=settings.wandb_exp_name,
                entity=settings.wandb_entity,
                dir=folder,
                config=dict(self._run_config),
                id=run_id,
                resume="allow",  # continue the run of that id, if there is one
            )
        except wandb.errors.UsageError as error:  # no login, for example
            raise ValueError(f"--wandb-project {settings.wandb_project}: {error}") from error
        if folder is not None:
            id_of_last.write_text(f"{self._wandb.id}\n")

    def _open_tensorboard(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, and most ranks write nothing

        settings = self._settings
        self._tensorboard = SummaryWriter(settings.tensorboard_dir, max_queue=1000)
        for name, value in self._run_config.items():
            self._tensorboard.add_text(name, str(value))
        self._tensorboard.add_custom_scalars(tensorboard_layout())

    @property
    def writes_points(self) -> bool:
        """Whether this rank writes to TensorBoard or wandb."""
        return self._to_tensorboard is not None or self._to_wandb is not None

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point per key at ``iteration``; does nothing where there is no writer."""

        def to_tensorboard() -> None:
            if self._tensorboard is None:
                self._open_tensorboard()
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, iteration)
                if not key.startswith(OVER_ITERATIONS_ONLY):
                    self._tensorboard.add_scalar(f"{key} vs samples", value, consumed_samples)

        if self._to_tensorboard is not None and not self._to_tensorboard(to_tensorboard):
            self._tensorboard = None  # its thread has ended; a new one begins another file

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


def describe_program(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Return the command, the checkout's commit, if any, with -dirty if files were changed, and versions."""
    described = {"command": shlex.join(sys.argv), "python_version": platform.python_version()}
    git = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout
        ran = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
        described["commit"] = ran.stdout.strip()
    for package in ("megatron_zpp", "torch"):
        with suppress(PackageNotFoundError):  # a checkout that is not installed
            described[f"{package}_version"] = version(package)
    return described
