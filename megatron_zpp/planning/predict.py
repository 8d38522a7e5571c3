"""Predict a run on a cluster: memory, bytes, and the seconds of everything in a step, by the cluster's rates."""

import shlex
import statistics
from dataclasses import dataclass, replace

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.arguments.recipe import choice_of
from megatron_zpp.families import Architecture, find_architecture
from megatron_zpp.metrics.history import RunHistory
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import Estimate, estimate
from megatron_zpp.planning.needs.traffic import island_piece_bytes
from megatron_zpp.planning.step import StepTime, step_times
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.recipes import RECIPES

# Bytes that kernels move to synchronize islands, for each element of a shard: differences, both hops, the outer step
# and the merge are about 13 passes over fp32.
SYNC_BYTES = 13 * 4


@dataclass(frozen=True)
class Prediction:
    """One run on one cluster."""

    cluster: Cluster
    needs: Estimate
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        """The rate of the whole cluster."""
        return self.needs.tokens / self.needs.steps / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization as in the log, without recomputation."""
        peak = self.cluster.world_size * self.cluster.peak_tflops * 1e12
        return self.tokens_per_second * self.needs.flops_per_token / peak

    @property
    def dollars_per_million_tokens(self) -> float:
        """The cost; 0 without a price."""
        dollars = self.cluster.world_size * self.cluster.dollars_per_gpu_hour
        return dollars / 3600 / self.tokens_per_second * 1e6


def estimate_on(cluster: Cluster, architecture: Architecture, settings: ResolvedSettings, vocabulary: int) -> Estimate:
    """Count memory and bytes, as ``estimate`` does. Raises ValueError for what is not estimated."""
    grid = RankGrid(cluster.nodes, cluster.gpus_per_node, settings.distributed)
    return estimate(architecture, settings, vocabulary, grid, cluster.ring_passes)


def predict(cluster: Cluster, needs: Estimate) -> Prediction:
    """Predict the run that ``needs`` counts; its slowest stage decides. Raises ValueError where islands cut nodes."""
    times = step_times(needs, island_cluster(needs.settings, cluster))
    slowest = max(times, key=lambda time: time.seconds)
    if needs.settings.distributed.islands > 1:
        slowest = _with_island_syncs(slowest, cluster, needs)
    return Prediction(cluster, needs, slowest)


def island_cluster(settings: ResolvedSettings, cluster: Cluster) -> Cluster:
    """Return one island's part of the cluster: all of it without islands. Raises ValueError if nodes are cut."""
    islands = settings.distributed.islands
    if islands == 1:
        return cluster
    if cluster.nodes % islands or islands % cluster.sites:
        cut = f"--islands {islands} of {cluster.nodes} nodes at {cluster.sites} site(s)"
        raise ValueError(f"{cut}: islands that are planned are whole nodes of one site; give another number")
    return replace(cluster, nodes=cluster.nodes // islands, sites=1)


def _with_island_syncs(time: StepTime, cluster: Cluster, needs: Estimate) -> StepTime:
    """Add to the time of a step within an island its share of an interval's synchronization."""
    config, islands = needs.settings.island, needs.settings.distributed.islands
    # Seconds of one of the two hops for the whole model, the mean of both. All ranks of an island send at once: each to
    # the same rank of every other island, and then around the ring.
    pieces = island_piece_bytes(needs.settings, needs.planned)  # per stage, for one rank
    hop = cluster.gpus_per_node * (islands - 1) * max(pieces) * 8e-9 / cluster.between_gbits
    microseconds = cluster.between_microseconds
    if cluster.sites > 1:
        to_other_sites = islands - islands / cluster.sites
        leaving_site = cluster.world_size / cluster.sites / len(pieces) * to_other_sites * sum(pieces)
        hop, microseconds = max(hop, leaving_site * 8e-9 / cluster.site_gbits), cluster.site_microseconds
    hop += config.fragments * islands / 2 * microseconds * 1e-6
    fragment_hop = hop / config.fragments
    # A fragment's second hop begins halfway through the delay. Training waits if a hop takes longer than its steps.
    steps_per_hop = ((config.sync_delay + 1) // 2, config.sync_delay // 2)
    waited = config.fragments * sum(max(0.0, fragment_hop - steps * time.seconds) for steps in steps_per_hop)
    # Links carry all fragments once in an interval, however they overlap.
    waited = max(waited, 2 * hop - config.sync_interval * time.seconds)
    shard = max(sum(unit.numel for unit in rank.units) for rank in needs.ranks)
    kernels = SYNC_BYTES * shard / (1e9 * cluster.kernel_gbytes)
    return replace(
        time,
        exposed_islands=waited / config.sync_interval,
        compression=time.compression + kernels / config.sync_interval,
    )


def compare_with_log(run: RunHistory, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step and of its parts, predicted and measured.

    Raises ValueError if the cluster is not the run's, or its log lacks the command or waits.
    """
    time = predict_logged(run, cluster).time
    predicted = time.seconds, time.exposed_between, time.exposed_within
    step, between, within = zip(predicted, measured_seconds(run), strict=True)
    return {
        "a step": step,
        "waiting for links between nodes": between,
        "waiting for links within nodes": within,
        "the rest": (step[0] - between[0] - within[0], step[1] - between[1] - within[1]),
    }


def measured_seconds(run: RunHistory) -> tuple[float, float, float]:
    """Return what a step took, and the waits for links between and within nodes: medians over log lines but the first.

    Raises ValueError if the run did not log them.
    """
    metrics, length = run.metrics, int(run.settings["seq_length"])
    rates, batches = metrics.get("tokens-per-second", {}), metrics.get("batch-size", {})
    columns = [
        {i: batches[i] * length / rate for i, rate in rates.items() if i in batches},
        *(metrics.get(f"comm/seconds-waited-{link}-nodes", {}) for link in ("between", "within")),
    ]
    if not all(columns):
        raise ValueError(f"{run.name} did not log how long its ranks waited for links")
    step, between, within = (statistics.median([*column.values()][1:] or [*column.values()]) for column in columns)
    return step, between, within


def calibrate(cluster: Cluster, run: RunHistory) -> Cluster:
    """Return the cluster at the rate of arithmetic that explains what a logged run on such nodes did beside waiting.

    Scales both shares of the peak. Raises ValueError if the run's ranks are no whole nodes of the cluster, if it
    logged no waits, or if no rate explains it.
    """
    ranks = int(run.settings.get("world_size", 0))
    if ranks % cluster.gpus_per_node:
        raise ValueError(f"{run.name} had {ranks} ranks, which are no whole nodes of {cluster.gpus_per_node} GPUs")
    own = replace(cluster, nodes=ranks // cluster.gpus_per_node, sites=1)
    needs = predict_logged(run, own).needs
    step, between, within = measured_seconds(run)
    measured = step - between - within

    def scaled(factor: float, of: Cluster) -> Cluster:
        products, attention = factor * of.efficiency, factor * of.attention_efficiency
        return replace(of, efficiency=products, attention_efficiency=attention)

    def seconds(factor: float) -> float:
        time = predict(scaled(factor, own), needs).time
        return time.seconds - time.exposed_between - time.exposed_within

    most = 1 / max(cluster.efficiency, cluster.attention_efficiency)
    of_rate = seconds(most / 2) - seconds(most)  # what halving the rate adds; the rest does not depend on it
    rest = seconds(most) - of_rate
    if not seconds(most) <= measured:
        explained = f"{run.name} took {measured:.3g} s a step without waits: no rate of arithmetic explains that"
        raise ValueError(f"{explained}, at the peak it is {seconds(most):.3g} s")
    return scaled(most * of_rate / (measured - rest), cluster)


def predict_logged(run: RunHistory, cluster: Cluster) -> Prediction:
    """Predict a run by the command that started it. Raises ValueError."""
    missing = {"architecture", "padded_vocab_size", "command", "world_size"} - run.settings.keys()
    if missing:
        raise ValueError(f"{run.name} does not say its {', '.join(sorted(missing))}: an older version wrote it")
    ranks = int(run.settings["world_size"])
    if ranks != cluster.world_size:
        raise ValueError(f"--cluster has {cluster.nodes} x {cluster.gpus_per_node} GPUs, but {run.name} had {ranks}")
    architecture, vocabulary = find_architecture(run.settings["architecture"]), int(run.settings["padded_vocab_size"])
    flags = shlex.split(run.settings["command"])[1:]
    if run.settings.get("zeropp") in RECIPES:
        flags += f"--zeropp {choice_of(run.settings)}".split()  # what auto chose
    per_node = cluster.gpus_per_node
    settings = parse_settings(architecture, flags, ranks, lambda _: None, ranks_per_node=per_node)
    return predict(cluster, estimate_on(cluster, architecture, settings, vocabulary))
