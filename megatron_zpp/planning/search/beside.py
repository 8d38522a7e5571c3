"""What the planner predicts of a run that was logged, beside what its log says."""

from __future__ import annotations

import shlex
import statistics

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import find_architecture
from megatron_zpp.metrics.tensorboard_reader import RunHistory
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.predict import Prediction, estimate_on, predict

WAITED = "comm/seconds-waited-{}-nodes"
PARTS = ("a step", "waiting for links between nodes", "waiting for links within nodes", "the rest")


def predicted_and_measured(run: RunHistory, cluster: ClusterSpec) -> dict[str, tuple[float, float]]:
    """Seconds of a step and of its parts, as predicted and as measured; of runs that logged waits.

    Raises ValueError where the cluster is not the run's, or the run did not write what it takes.
    """
    time = predict_run(run, cluster).time
    predicted = time.seconds, time.exposed_between, time.exposed_within
    return {
        part: (of_plan, of_run)
        for part, of_plan, of_run in zip(PARTS, _with_rest(*predicted), _with_rest(*measured(run)), strict=True)
    }


def predict_run(run: RunHistory, cluster: ClusterSpec) -> Prediction:
    """By the command that started the run."""
    missing = {"architecture", "padded_vocab_size", "command", "world_size"} - run.settings.keys()
    if missing:
        raise ValueError(f"{run.name} does not say its {', '.join(sorted(missing))}: an older version wrote it")
    ranks = int(run.settings["world_size"])
    if ranks != cluster.world_size:
        raise ValueError(f"--cluster has {cluster.nodes} x {cluster.gpus_per_node} GPUs, but {run.name} had {ranks}")
    architecture, vocabulary = find_architecture(run.settings["architecture"]), int(run.settings["padded_vocab_size"])
    flags = shlex.split(run.settings["command"])[1:]
    settings = parse_settings(architecture, flags, cluster.world_size, note=lambda _: None, of_all_jobs=True)
    needs = estimate_on(architecture, settings, vocabulary, cluster)
    return predict(architecture, settings, cluster, needs)


def measured(run: RunHistory) -> tuple[float, float, float]:
    """Seconds of a step, and of these waited for links between and within nodes; medians over log lines but the first.

    Raises ValueError where no waits were written.
    """
    metrics, length = run.metrics, int(run.settings["seq_length"])
    tokens_per_second, batches = metrics.get("tokens-per-second", {}), metrics.get("batch-size", {})
    columns = [
        {i: batches[i] * length / rate for i, rate in tokens_per_second.items() if i in batches},
        *(metrics.get(WAITED.format(link), {}) for link in ("between", "within")),
    ]
    if not all(columns):
        raise ValueError(f"{run.name} did not log how long its ranks waited for links")
    step, between, within = (statistics.median([*column.values()][1:] or [*column.values()]) for column in columns)
    return step, between, within


def _with_rest(step: float, between: float, within: float) -> tuple[float, float, float, float]:
    return step, between, within, step - between - within
