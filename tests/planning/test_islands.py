"""Sites with a slow link between them, and the time that islands synchronize over it."""

import dataclasses
import itertools

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import LLAMA
from megatron_zpp.planning.cluster import LINK_SHARE, Cluster, parse_cluster, read_cluster, write_cluster
from megatron_zpp.planning.needs.division import RankGroup
from megatron_zpp.planning.needs.traffic import Exchange
from megatron_zpp.planning.predict import Prediction, estimate_on, predict
from megatron_zpp.planning.search import make_plan
from megatron_zpp.zeropp.recipes import RECIPES

MODEL = "--preset llama-8b --num-layers 4 --seq-length 2048 --micro-batch-size 1 --lr 1 --train-iters 9 --mock-data"
MODEL += " --bf16 --vocab-size 31999 --tokenizer-type NullTokenizer --global-batch-size 32"
VOCABULARY = 32000
SITES = parse_cluster("2x2x8xH100@400@10")


def predicted(flags: str, cluster: Cluster = SITES) -> Prediction:
    argv = f"{MODEL} {flags}".split()
    settings = parse_settings(LLAMA, argv, cluster.world_size, note=lambda _: None)
    return predict(cluster, estimate_on(cluster, LLAMA, settings, VOCABULARY))


def test_a_word_may_begin_with_sites(tmp_path):
    assert (SITES.sites, SITES.nodes, SITES.world_size) == (2, 4, 32)
    assert (SITES.between_gbits, SITES.site_gbits) == (400 * LINK_SHARE, 10 * LINK_SHARE)
    write_cluster(tmp_path / "cluster.toml", SITES)
    assert read_cluster(tmp_path / "cluster.toml") == SITES
    with pytest.raises(ValueError, match="4 nodes do not divide among 3 sites"):
        dataclasses.replace(SITES, sites=3)


@pytest.mark.parametrize("sites, is_straight, per_node", [*itertools.product((2, 4), (False, True), (1, 2, 8))])
def test_seconds_of_collectives_between_sites(sites, is_straight, per_node):
    """Every message of every group written down, on a link so slow that nothing else counts."""
    cluster = dataclasses.replace(SITES, nodes=8, sites=sites, site_gbits=1e-3, site_microseconds=0.0)
    nbytes = 1000
    leaving = [0] * sites
    for _ in range(8 // per_node):  # equal groups
        homes = [node // (cluster.nodes // sites) for node in range(cluster.nodes) for _ in range(per_node)]
        for i, home in enumerate(homes):
            if is_straight:
                leaving[home] += nbytes * sum(other != home for other in homes)
            elif homes[(i + 1) % len(homes)] != home:
                leaving[home] += nbytes * (len(homes) - 1)
    assert len(set(leaving)) == 1
    found = cluster.exchange_seconds(Exchange(RankGroup(cluster.nodes, per_node), nbytes, is_straight=is_straight))
    assert found == pytest.approx(leaving[0] * 8e-9 / cluster.site_gbits, rel=1e-3)
    exchange = Exchange(RankGroup(1, 8), 10**6)  # within a node
    assert SITES.exchange_seconds(exchange) == dataclasses.replace(SITES, sites=1).exchange_seconds(exchange)


def test_a_step_of_islands_waits_for_the_slow_link_at_synchronizations_alone():
    flags = "--islands 2 --island-sync-interval 50"
    slow, fast = predicted(flags), predicted(flags, dataclasses.replace(SITES, site_gbits=80.0))
    inside = predicted("--global-batch-size 16", parse_cluster("2x8xH100@400"))
    parts = vars(slow.time).keys() - {"exposed_islands", "compression"}
    for part in parts:
        assert getattr(slow.time, part) == getattr(fast.time, part) == pytest.approx(getattr(inside.time, part)), part
    latency = 2 * SITES.site_microseconds * 1e-6 / 50
    assert slow.time.exposed_islands - latency == pytest.approx(10 * (fast.time.exposed_islands - latency))
    # One site's bytes in one step, a mean over the interval.
    of_site = slow.needs.sent_between_islands / 2
    assert slow.time.exposed_islands == pytest.approx(of_site * 8e-9 / SITES.site_gbits + latency, rel=1e-6)
    assert predicted("").time.seconds > 3 * slow.time.seconds


@pytest.mark.parametrize(
    "interval, fragments, delay, waited",
    [
        (10, 1, 0, 10.0),  # both hops
        (10, 1, 4, 6.0),  # each hop has 2 steps
        (10, 1, 5, 5.0),  # 3 and 2
        (20, 2, 4, 2.0),  # half of the model at once
        (20, 2, 6, 0.0),
        (4, 2, 3, 10.0 - 4.0),  # the link has no more time
    ],
)
def test_training_waits_only_for_hops_longer_than_the_delay(interval, fragments, delay, waited):
    """A hop of the whole model takes as long as five steps, on the link of one rank of each node."""
    flags = f"--islands 2 --island-sync-interval {interval} --island-fragments {fragments} --island-sync-delay {delay}"
    cluster = dataclasses.replace(SITES, site_microseconds=0.0, kernel_gbytes=1e9)
    once = predicted(flags, cluster)
    step = once.time.seconds - once.time.exposed_islands
    of_hop = once.needs.sent_between_islands * interval / 2 / 2  # bytes of a site
    found = predicted(flags, dataclasses.replace(cluster, site_gbits=of_hop * 8e-9 / (5 * step)))
    assert found.time.exposed_islands * interval == pytest.approx(waited * step, rel=1e-6, abs=1e-9)


def test_islands_on_one_site_share_the_links_of_its_nodes():
    cluster = parse_cluster("4x8xH100@400")
    found = predicted("--islands 2 --island-sync-interval 10", cluster)
    of_node = found.needs.sent_between_islands / 4  # in one step
    latency = 2 * cluster.between_microseconds * 1e-6 / 10
    assert found.time.exposed_islands == pytest.approx(of_node * 8e-9 / cluster.between_gbits + latency, rel=1e-6)


@pytest.mark.parametrize("islands, cluster", [(8, SITES), (2, parse_cluster("4x1x8xH100@400@10"))])
def test_islands_are_whole_nodes_of_a_site(islands, cluster):
    with pytest.raises(ValueError, match=f"--islands {islands} of 4 nodes at . site.s.: islands that are planned"):
        predicted(f"--islands {islands}", cluster)


def test_the_plan_shows_waits_for_islands():
    flags = f"{MODEL} --recompute-activations --tensor-model-parallel-size 1 --islands 2".split()
    plan = make_plan(LLAMA, flags, VOCABULARY, SITES)
    assert {outcome.candidate.wire.name for outcome in plan.outcomes} >= {"ZeRO-3", "int8"}
    assert all(outcome.prediction.time.exposed_islands > 0 for outcome in plan.outcomes)
    without = make_plan(LLAMA, [*flags[:-2]], VOCABULARY, SITES)
    assert all(outcome.prediction.time.exposed_islands == 0 for outcome in without.outcomes)
    rates = [{o.candidate.wire.name: o.prediction.tokens_per_second for o in each.outcomes} for each in (without, plan)]
    assert all(rates[0][name] < rates[1][name] for name in ("ZeRO-3", *[*RECIPES][1:3]))
