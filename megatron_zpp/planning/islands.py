"""What agreements of islands add to a step, once in so many steps over the links between them."""

from __future__ import annotations

import dataclasses

from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.needs.estimate import Estimate, bytes_of_pieces
from megatron_zpp.planning.step import StepTime
from megatron_zpp.settings.resolved import ResolvedSettings

# Bytes of an element of a rank's shard that kernels read and write for an agreement: differences, both hops, the outer
# step and the merge are about 13 passes over fp32.
BYTES_OF_AN_AGREEMENT = 13 * 4


def island_of(settings: ResolvedSettings, cluster: ClusterSpec) -> ClusterSpec:
    """What one island of the run has of the cluster: all of it without islands. Raises ValueError if nodes are cut."""
    islands = settings.distributed.islands
    if islands == 1:
        return cluster
    if cluster.nodes % islands or islands % cluster.sites:
        raise ValueError(
            f"--islands {islands} of {cluster.nodes} nodes at {cluster.sites} site(s): islands that are planned are "
            "whole nodes of one site; give another number"
        )
    return dataclasses.replace(cluster, nodes=cluster.nodes // islands, sites=1)


def with_agreements(time: StepTime, settings: ResolvedSettings, cluster: ClusterSpec, needs: Estimate) -> StepTime:
    """``time`` of a step within an island, with its share of the agreements of an interval."""
    config = settings.island
    hop = hop_seconds(settings, cluster, needs)
    of_fragment = hop / config.fragments
    # A fragment turns to its second hop halfway. Training waits where a hop takes longer than the steps that it has.
    steps_of_hops = ((config.sync_delay + 1) // 2, config.sync_delay // 2)
    waited = config.fragments * sum(max(0.0, of_fragment - steps * time.seconds) for steps in steps_of_hops)
    # However they overlap, links carry all fragments once in an interval.
    waited = max(waited, 2 * hop - config.sync_interval * time.seconds)
    shard = max(sum(exchanges.unit.numel for exchanges in rank.exchanges) for rank in needs.ranks)
    kernels = BYTES_OF_AN_AGREEMENT * shard / (1e9 * cluster.kernel_gbytes)
    return dataclasses.replace(
        time,
        exposed_islands=waited / config.sync_interval,
        compression=time.compression + kernels / config.sync_interval,
    )


def hop_seconds(settings: ResolvedSettings, cluster: ClusterSpec, needs: Estimate) -> float:
    """How long one of an agreement's two hops takes for the whole model: the mean of both, which send as much.

    All ranks of an island send at once: each to the rank of its place in every other island, and then around the ring.
    """
    islands = settings.distributed.islands
    pieces = bytes_of_pieces(settings, needs.planned)  # of a rank of each stage
    seconds = cluster.gpus_per_node * (islands - 1) * max(pieces) * 8e-9 / cluster.between_gbits
    microseconds = cluster.between_microseconds
    if cluster.sites > 1:
        to_other_sites = islands - islands / cluster.sites
        of_site = cluster.world_size / cluster.sites / len(pieces) * to_other_sites * sum(pieces)
        seconds, microseconds = max(seconds, of_site * 8e-9 / cluster.site_gbits), cluster.site_microseconds
    latency = settings.island.fragments * (1 + (islands - 1)) / 2 * microseconds
    return seconds + latency * 1e-6
