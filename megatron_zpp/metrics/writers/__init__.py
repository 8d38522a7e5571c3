"""Where a run's points go: metrics.jsonl, TensorBoard, wandb and MLflow, each a ``Writer`` in a file of its own."""

import dataclasses
import functools
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_zpp.metrics.history import METRICS, read_run
from megatron_zpp.metrics.lasting import Attempts
from megatron_zpp.metrics.lines import TrainingReport, perplexity
from megatron_zpp.metrics.writers.base import RunStart, Writer
from megatron_zpp.metrics.writers.jsonl import JsonlWriter
from megatron_zpp.metrics.writers.mlflow import MLflowWriter
from megatron_zpp.metrics.writers.tensorboard import TensorBoardWriter
from megatron_zpp.metrics.writers.wandb import WandbWriter
from megatron_zpp.settings.flags import flags_of_fields
from megatron_zpp.settings.groups import LoggingSettings


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


# By the setting that asks for it: the writer, its package, which is an extra of megatron_zpp, and what it writes.
_WRITERS: dict[str, tuple[Callable[[RunStart], Writer], str, str]] = {
    "tensorboard_dir": (TensorBoardWriter, "tensorboard", "TensorBoard's events in"),
    "wandb_project": (WandbWriter, "wandb", "wandb's run of"),
    "mlflow_experiment": (MLflowWriter, "mlflow", "MLflow's run of"),
}


def check_writers(settings: LoggingSettings) -> None:
    """Raise ValueError if a package is missing that the flags need."""
    for setting, (_, package, _) in _WRITERS.items():
        spec = importlib.util.find_spec(package) if getattr(settings, setting) is not None else None
        # A folder of that name, such as wandb's ./wandb, has no origin.
        if getattr(settings, setting) is not None and (spec is None or spec.origin is None):
            flag = flags_of_fields(LoggingSettings)[setting]
            raise ValueError(f"{flag} needs the package {package}, of megatron_zpp's extra {package}")


class MetricWriters:
    """All writers that the flags ask for. A failing one is a warning, and training goes on without it.

    Build it on every rank, so that a missing package stops all of them; only ``is_writer``'s writes. Raises ValueError
    for a missing package, a failed login, or a metrics.jsonl that another run writes.
    """

    def __init__(self, start: RunStart, *, is_writer: bool) -> None:
        logging = start.logging
        check_writers(logging)
        if is_writer and start.resumes and (logging.wandb_project or logging.mlflow_experiment):
            start = dataclasses.replace(start, kept=_kept(start))
        asked: list[tuple[str, Callable[[RunStart], Writer]]] = []
        if start.folder is not None:
            asked.append((f"{METRICS} in {start.folder}", JsonlWriter))
        for setting, (kind, _, what) in _WRITERS.items():
            if (value := getattr(logging, setting)) is not None:
                asked.append((f"{what} {value}", kind))
        self._outputs = [_Output(place, functools.partial(kind, start)) for place, kind in asked if is_writer]

    @property
    def writes_points(self) -> bool:
        """Whether this rank writes points anywhere."""
        return bool(self._outputs)

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point per key at ``iteration``; does nothing where there is no writer."""
        for output in self._outputs:
            output.write(metrics, iteration, consumed_samples)

    def close(self) -> None:
        """Write out everything, and end the runs of wandb and MLflow."""
        for output in self._outputs:
            output.close()


class _Output:
    """One writer, opened again later where its disk was full."""

    def __init__(self, place: str, build: Callable[[], Writer]) -> None:
        self._build, self._attempts = build, Attempts(place)
        self._writer: Writer | None = None
        self._attempts(self._open, OSError)

    def _open(self) -> Writer:
        self._writer = self._writer or self._build()
        return self._writer

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        self._attempts(lambda: self._open().write(metrics, iteration, consumed_samples))

    def close(self) -> None:
        if self._writer is not None:
            self._attempts(self._writer.close)


def _kept(start: RunStart) -> list[tuple[Mapping[str, float], int, int]] | None:
    """Return the points to begin a new run with, where an earlier start went further with other settings; else None.

    With the same settings the steps that a crash lost are the same again, and the run goes on.
    """
    path = start.folder / METRICS if start.folder is not None else None
    if path is None or start.iteration is None or not path.exists():
        return None
    try:
        run, settings = read_run(str(path), path), json.loads(json.dumps(dict(start.settings)))
    except (OSError, ValueError) as error:
        print(f"warning: {error}: wandb and MLflow go on with the run before", file=sys.stderr, flush=True)
        return None
    others = {"load", *start.program}  # ``run.settings`` has the program's values of the latter
    is_same = all(run.settings.get(name) == value for name, value in settings.items() if name not in others)
    return None if is_same or max(run.samples, default=0) <= start.iteration else [*run.points_until(start.iteration)]


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
