"""A run of wandb (``--wandb-project``); WANDB_MODE=offline keeps its points for ``wandb sync``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.metrics.writers.base import RunStart, write_id


class WandbWriter:
    """wandb drops points below its last step, so a run that goes back with other settings begins a new one."""

    def __init__(self, start: RunStart) -> None:
        import wandb

        logging, labels = start.logging, start.labels
        folder = os.path.join(start.save, "wandb") if start.save else None
        id_file = Path(folder, "run_id") if folder is not None else None
        if folder is not None:
            os.makedirs(folder, exist_ok=True)  # wandb falls back to a temporary folder otherwise
        tags = [labels[name] for name in ("architecture", "zero", "recipe") if name in labels]
        own: dict[str, tuple[str, Any]] = {
            "RUN_GROUP": ("group", labels.get("group")),
            "JOB_TYPE": ("job_type", labels["job_type"]),
        }
        own |= {"RUN_ID": ("id", start.last_id(id_file)), "TAGS": ("tags", tags)}
        run: dict[str, Any] = {name: value for key, (name, value) in own.items() if f"WANDB_{key}" not in os.environ}
        run |= {"project": logging.wandb_project, "name": logging.wandb_exp_name, "entity": logging.wandb_entity}
        try:  # "allow": continue the run of that id, if there is one
            self._run = wandb.init(**run, dir=folder, config=start.shown, resume="allow")
        except wandb.errors.UsageError as error:  # no login, for example
            raise ValueError(f"--wandb-project {logging.wandb_project}: {error}") from error
        write_id(id_file, self._run.id)
        self._run.define_metric("lm loss*", step_metric="tokens")  # all others over wandb's step, the iteration
        for point in start.kept or ():
            self.write(*point)

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        self._run.log({**metrics, "samples vs steps": consumed_samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()
