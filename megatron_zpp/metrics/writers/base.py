"""The interface of a writer of metrics, and the record of a run's start that it is built with."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_zpp.settings.groups import LoggingSettings


@dataclass(frozen=True)
class RunStart:
    """One start of a run: its settings, and where it goes on."""

    logging: LoggingSettings
    save: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # all, by name
    changed: Mapping[str, Any] = field(default_factory=dict)  # settings that are not at their defaults
    program: Mapping[str, Any] = field(default_factory=dict)  # command, versions, model, ranks
    iteration: int | None = 0  # the checkpoint's that it goes on from; None: it trains nothing
    resumes: bool = False  # goes on with the run that wrote to the same folders
    # Points up to ``iteration``, where that run went further with other settings: a writer that cannot take back points
    # begins a new run with these.
    kept: Sequence[tuple[Mapping[str, float], int, int]] | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of metrics.jsonl, absolute; None if the run was given none."""
        folder = self.logging.metrics_dir or self.logging.tensorboard_dir or self.save
        return Path(folder).absolute() if folder is not None else None

    @property
    def shown(self) -> dict[str, Any]:
        """Return the settings and facts that a dashboard shows with the run."""
        return {**self.changed, **self.program}

    @property
    def labels(self) -> dict[str, str]:
        """Return the run's group, which its restarts share, its job type and model, ZeRO stage and recipe."""
        named, values = self.logging.wandb_exp_name or (self.folder.name if self.folder else None), self.settings
        kind = "evaluate" if values.get("skip_train") else "finetune" if values.get("finetune") else "train"
        labels = {"group": named, "job_type": kind, "architecture": self.program.get("architecture")}
        labels |= {"zero": f"ZeRO-{values.get('zero_stage')}", "recipe": values.get("zeropp")}
        return {name: label for name, label in labels.items() if label is not None}

    def last_id(self, file: Path | None) -> str | None:
        """Return the other program's id of the run that this start goes on with; None to begin a new one."""
        goes_on = file is not None and self.resumes and self.kept is None and file.exists()
        return file.read_text().strip() if file is not None and goes_on else None


class Writer(Protocol):
    """Where points go. It may raise any Exception: the run goes on, with a warning, and tries again a minute later.

    Built on one rank with the ``RunStart``: an OSError there is a warning too, other errors end the run.
    """

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point per key."""

    def close(self) -> None:
        """Write out everything."""


def write_id(file: Path | None, run_id: str) -> None:
    """Keep the other program's id of this run, for ``RunStart.last_id``."""
    if file is not None:
        os.makedirs(file.parent, exist_ok=True)
        file.write_text(f"{run_id}\n")
