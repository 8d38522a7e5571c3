"""The table of docs/islands.md: two sites as one cluster, and as two islands. ``planner.py islands`` prints it.

Of Llama-8B on 2 sites of 32 nodes of 8 H100, 400 Gbit/s out of a node: tokens per second over those where no link takes
any time, with ranks that share data alone, and the micro-batch and recomputation that are fastest.
"""

from __future__ import annotations

import dataclasses

from common import markdown_table

from megatron_zpp.families import LLAMA
from megatron_zpp.planning.cluster import Cluster, parse_cluster
from megatron_zpp.planning.search.plan import make_plan

SITE = "2x32x8xH100@400"
GBITS = (1, 5, 25, 100, 400)  # that leave a site
RUN = "--preset llama-8b --seq-length 4096 --tensor-model-parallel-size 1 --global-batch-size 2048"
VOCABULARY = 128256
ISLANDS = "--islands 2 --island-sync-interval 100"
STREAMING = "--island-fragments 4 --island-sync-delay 20 --island-merge-alpha 0.5"
COLUMNS = {  # the wire preset of all ranks that train together, and flags
    "ZeRO-3": ("ZeRO-3", ""),
    "ZeRO++, all flags": ("all flags", ""),
    "ZeRO++, moved codes": ("all flags, moves", ""),
    "islands, fp32": ("ZeRO-3", ISLANDS),
    "islands, 4 bits": ("ZeRO-3", f"{ISLANDS} --island-bits 4 --island-loco"),
    "islands, 4 bits, streaming": ("ZeRO-3", f"{ISLANDS} --island-bits 4 --island-loco {STREAMING}"),
}


def tokens_per_second(cluster: Cluster, flags: str) -> dict[str, float]:
    """Return the rate of each wire preset that fits."""
    plan = make_plan(LLAMA, f"{RUN} {flags}".split(), VOCABULARY, cluster)
    return {outcome.candidate.wire.name: outcome.prediction.tokens_per_second for outcome in plan.outcomes}


def print_table() -> None:
    without_links = dataclasses.replace(
        parse_cluster(f"{SITE}@1"), sites=1, between_gbits=1e12, within_gbytes=1e12, between_microseconds=0.0
    )
    most = tokens_per_second(dataclasses.replace(without_links, within_microseconds=0.0), "")["ZeRO-3"]
    lines = []
    for gbits in GBITS:
        cluster = parse_cluster(f"{SITE}@{gbits}")
        found = {flags: tokens_per_second(cluster, flags) for _, flags in COLUMNS.values()}
        shares = [found[flags][wire] / most for wire, flags in COLUMNS.values()]
        lines.append([gbits, *(f"{share:.1%}" for share in shares)])
    print(markdown_table(["Gbit/s between sites", *COLUMNS], lines))
