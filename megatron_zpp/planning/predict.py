"""What a run would do on a cluster: memory, bytes, and the parts of a step's time."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.families import Architecture
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.costs import step_shapes
from megatron_zpp.planning.islands import island_of, with_agreements
from megatron_zpp.planning.needs.estimate import Cluster, Estimate, estimate
from megatron_zpp.planning.needs.planned_units import PlannedModel
from megatron_zpp.planning.step import StepTime, simulate
from megatron_zpp.settings.resolved import ResolvedSettings


@dataclass(frozen=True)
class Prediction:
    """One run on one cluster."""

    settings: ResolvedSettings
    cluster: ClusterSpec
    needs: Estimate
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster."""
        return self.needs.tokens / self.needs.steps / self.time.seconds

    @property
    def mfu(self) -> float:
        """By the log's convention: recomputation is not counted."""
        peak = self.cluster.world_size * self.cluster.peak_tflops * 1e12
        return self.tokens_per_second * self.needs.flops_per_token / peak

    @property
    def dollars_per_million_tokens(self) -> float:
        """0 without a price."""
        dollars = self.cluster.world_size * self.cluster.dollars_per_gpu_hour
        return dollars / 3600 / self.tokens_per_second * 1e6


def estimate_on(
    architecture: Architecture,
    settings: ResolvedSettings,
    vocabulary: int,
    cluster: ClusterSpec,
    planned: PlannedModel | None = None,
) -> Estimate:
    """Memory and bytes, as ``estimate``. Raises ValueError for what is not estimated."""
    ranks = Cluster(cluster.nodes, cluster.gpus_per_node, ring_passes=cluster.ring_passes)
    return estimate(architecture, settings, vocabulary, ranks, planned)


def predict(
    architecture: Architecture, settings: ResolvedSettings, cluster: ClusterSpec, needs: Estimate
) -> Prediction:
    """The run that ``needs`` is about. A pipeline is as fast as its slowest stage. Raises ValueError, of islands."""
    island = island_of(settings, cluster)
    shapes = set(step_shapes(architecture, settings, needs, island))
    slowest = max(map(simulate, shapes), key=lambda time: time.seconds)
    if settings.distributed.islands > 1:
        slowest = with_agreements(slowest, settings, cluster, needs)
    return Prediction(settings, cluster, needs, slowest)
