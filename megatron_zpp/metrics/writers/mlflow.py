"""A run of MLflow (``--mlflow-experiment``), in MLFLOW_TRACKING_URI or else the folder mlruns beside metrics.jsonl."""

import os
from collections.abc import Mapping

from megatron_zpp.metrics.writers.base import RunStart, write_id


class MLflowWriter:
    """MLflow keeps all points of a step, so a run that goes back with other settings begins a new one."""

    def __init__(self, start: RunStart) -> None:
        import mlflow

        folder, labels = start.folder, start.labels
        id_file = folder / "mlruns" / "run_id" if folder is not None else None
        if folder is not None:
            os.environ.setdefault("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow wants a database for a folder
        self._mlflow, run_id = mlflow, os.environ.get("MLFLOW_RUN_ID") or start.last_id(id_file)
        try:
            mlflow.set_experiment(start.logging.mlflow_experiment)
            self._run = mlflow.start_run(run_id, run_name=labels.get("group"), tags=labels)
            if run_id is None:  # a resume may not change parameters
                mlflow.log_params({name: str(value)[:6000] for name, value in start.shown.items()})
        except mlflow.exceptions.MlflowException as error:  # no server, for example
            raise ValueError(f"--mlflow-experiment {start.logging.mlflow_experiment}: {error}") from error
        write_id(id_file, self._run.info.run_id)
        for point in start.kept or ():
            self.write(*point)

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        points = {**metrics, "samples": consumed_samples}
        self._mlflow.log_metrics(points, step=iteration, run_id=self._run.info.run_id, synchronous=False)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()
