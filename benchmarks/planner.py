"""Are the planner's predictions right? Compared with published measurements, and with the cluster in a box.

    .venv/bin/python benchmarks/planner.py fit        # fits the constants of planning/cluster.py
    .venv/bin/python benchmarks/planner.py published  # predicts the published rows
    .venv/bin/python benchmarks/planner.py worth      # models, nodes, rates: when is ZeRO++ worth it?
    .venv/bin/python benchmarks/planner.py islands    # rates between two sites
    sudo .venv/bin/python benchmarks/planner.py box   # measures in the cluster in a box: on an idle machine, an hour
    .venv/bin/python benchmarks/planner.py compare    # those measurements beside what is predicted for them

``fit`` to ``islands`` compute for minutes, and keep their tables in ``results/planner_*.md``; ``examples/reproduce.sh
--write`` takes them into the pages. ``planner_published.py`` and ``planner_box.py`` say what they compare.
"""

import dataclasses
import itertools
from collections.abc import Callable

import planner_box
import planner_published
from common import RESULTS, markdown_table, run_choice

from megatron_zpp.commands.plan import suggested
from megatron_zpp.families import LLAMA
from megatron_zpp.planning.cluster import Cluster, default_cluster, parse_cluster
from megatron_zpp.planning.search import Outcome, make_plan

LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096"
)
MODELS = {
    "Llama-8B": "--preset llama-8b --seq-length 4096",
    "Llama-70B": LLAMA_70B,
}
NODES, RATES = (8, 64), (25, 100, 400, 800)
TOKENS_PER_GPU = 4 * 4096  # per step
LLAMA_3_VOCABULARY = 128256
# Two sites as one cluster, and as two islands.
SITE = "2x32x8xH100@400"
GBITS = (1, 5, 25, 100, 400)  # that leave a site
RUN = "--preset llama-8b --seq-length 4096 --tensor-model-parallel-size 1 --global-batch-size 2048"
ISLANDS = "--islands 2 --island-sync-interval 100"
STREAMING = "--island-fragments 4 --island-sync-delay 20 --island-merge-alpha 0.5"
KINDS = ("ZeRO-3", "HSDP", "lossless", "int8", "int6")
COLUMNS = {  # the way to send of all ranks that train together, and flags
    "ZeRO-3": ("ZeRO-3", ""),
    "ZeRO++, lossless": ("lossless", ""),
    "ZeRO++, int8": ("int8", ""),
    "islands, fp32": ("ZeRO-3", ISLANDS),
    "islands, 4 bits": ("ZeRO-3", f"{ISLANDS} --island-bits 4 --island-loco"),
    "islands, 4 bits, streaming": ("ZeRO-3", f"{ISLANDS} --island-bits 4 --island-loco {STREAMING}"),
}


def kept(name: str) -> str:
    """Return the tables that ``keep`` has kept."""
    return (RESULTS / f"planner_{name}.md").read_text().rstrip()


def keep(name: str, tables: Callable[[], str]) -> None:
    (RESULTS / f"planner_{name}.md").write_text(f"{tables()}\n")
    print(kept(name))


def worth() -> str:
    """Return rows of model, nodes and rate: MFU of the best of each kind, and the suggestion."""
    headings = ["model", "nodes", "Gbit/s", *KINDS, "suggested"]
    lines = []
    for (model, flags), nodes, rate in itertools.product(MODELS.items(), NODES, RATES):
        cluster = default_cluster(nodes, 8, "H100", rate)
        batch = f"--global-batch-size {TOKENS_PER_GPU // 4096 * cluster.world_size}"
        plan = make_plan(LLAMA, f"{flags} {batch}".split(), LLAMA_3_VOCABULARY, cluster)
        found = {outcome.candidate.wire.name: outcome for outcome in reversed(plan.outcomes)}
        best = suggested(plan).candidate if plan.outcomes else None
        suggestion = f"{best.wire.name}, {best.layout.name}" if best is not None else "nothing"
        lines.append([model, nodes, rate, *(cell(found.get(kind)) for kind in KINDS), suggestion])
    return markdown_table(headings, lines)


def cell(found: Outcome | None) -> str:
    if found is None:
        return "does not fit"
    return f"{found.prediction.mfu:.0%}, {found.prediction.time.seconds:.2f} s, {found.candidate.layout.name}"


def tokens_per_second(cluster: Cluster, flags: str) -> dict[str, float]:
    """Return the rate of each way to send that fits."""
    plan = make_plan(LLAMA, f"{RUN} {flags}".split(), LLAMA_3_VOCABULARY, cluster)
    return {outcome.candidate.wire.name: outcome.prediction.tokens_per_second for outcome in plan.outcomes}


def islands() -> str:
    """Return tokens per second of Llama-8B on 2 sites of 32 nodes, as shares of those without any time on links."""
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
    return markdown_table(["Gbit/s between sites", *COLUMNS], lines)


if __name__ == "__main__":
    run_choice(
        __doc__,
        {
            "fit": lambda: print(planner_published.keep_parts()),
            "published": lambda: keep("published", planner_published.tables),
            "worth": lambda: keep("worth", worth),
            "islands": lambda: keep("islands", islands),
            "box": planner_box.measure,
            "compare": lambda: print(planner_box.table()),
        },
    )
