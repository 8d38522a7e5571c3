"""Clusters as words and files, and how long their collectives take."""

import dataclasses
import re
from typing import Any

import pytest

from megatron_zpp.planning.cluster import GPUS, LINK_SHARE, parse_cluster, write_cluster
from megatron_zpp.planning.needs.division import RankGroup
from megatron_zpp.planning.needs.traffic import Exchange


def test_a_word_is_nodes_gpus_kind_and_gigabits():
    cluster = parse_cluster("64x8xH100@100")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu, cluster.world_size) == (64, 8, "H100", 512)
    assert (cluster.peak_tflops, cluster.memory_gb, cluster.between_gbits) == (989.0, 80, 100 * LINK_SHARE)
    assert parse_cluster("1x1xa100-40gb@3.5").gpu == "A100-40GB"
    memory = {gpu: parse_cluster(f"1x1x{gpu}@1").memory_gb for gpu in ("V100", "A100-40GB", "H200")}
    assert memory == {"V100": 32, "A100-40GB": 40, "H200": 141}  # as NVIDIA's data sheets say
    assert all(parse_cluster(f"2x4x{gpu}@10").peak_tflops > 0 for gpu in GPUS)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("8xH100", "neither a file nor of the form 64x8xH100@100"),
        ("8x8xZ80@100", "the GPU Z80 is not known: give one of T4, V100"),
        ("0x8xH100@100", "nodes is 0"),
        ("8x8xH100@0", "between_gbits is 0"),
        ("2x2x8xH100@400", "2x32x8xH100@400@10 of several sites"),
        ("2x8xH100@400@10", "2x32x8xH100@400@10 of several sites"),
        ("2x2x8xH100@400@0", "site_gbits is 0: say what leaves each of the 2 sites"),
        ("0x2x8xH100@400@10", "nodes is 0"),
    ],
)
def test_words_that_are_no_cluster(word, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cluster(word)


def test_a_file_keeps_every_field(tmp_path):
    curves = {"all-gather 3x2": {"4096": 1e-3, "65536": 2.5e-3}}
    more = dict(overlaps=False, ring_passes=2, dollars_per_gpu_hour=1.5, collective_seconds=curves)
    cluster = dataclasses.replace(parse_cluster("3x2xL40S@12.5"), **more)
    write_cluster(tmp_path / "cluster.toml", cluster, "measured today\nby me")
    assert parse_cluster(str(tmp_path / "cluster.toml")) == cluster


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("nodes = 2", "nodes = two"), "Invalid value (at line 1, column 9)"),
        (("nodes = 2", "nodes = true"), "nodes is true: give a whole number"),
        (("nodes = 2", "nodes = 2026-11-29"), 'nodes is "2026-11-29": give a whole number'),
        (("nodes = 2", "nodes = 2.5"), "nodes is 2.5: give a whole number"),
        (("nodes = 2", "knots = 2"), "a cluster file has no field knots: give nodes, "),
        (("nodes = 2  #", "#"), "nodes missing"),
        (("efficiency = 0.5", "efficiency = 50"), "efficiency is 50: give a share"),
        (("efficiency = 0.5", "efficiency = 'half'"), 'efficiency is "half": give a number'),
        (("gpus_per_node = 2", "gpus_per_node = -2"), "gpus_per_node is -2"),
        (("overlaps = true", "overlaps = 1"), "overlaps is 1: give true or false"),
        (("sites = 1", "collective_seconds = 4"), "collective_seconds is 4: give a table"),
        (("sites = 1", 'collective_seconds."all-gather 2x2" = 7'), "collective_seconds is not as"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path, change, said):
    path = tmp_path / "cluster.toml"
    write_cluster(path, dataclasses.replace(parse_cluster("2x2xH100@10"), efficiency=0.5))
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cluster(str(path))


def test_seconds_of_collectives():
    rates = dict(within_gbytes=100, between_gbits=80, within_microseconds=1, between_microseconds=10)
    cluster = dataclasses.replace(parse_cluster("4x8xH100@100"), **rates)
    # A ring over all 32 ranks: one of a node's 8 ranks sends 31 pieces of 1 MB over its 10 GB/s.
    flat = Exchange(RankGroup(4, 8), 10**6)
    assert cluster.exchange_seconds(flat) == pytest.approx(31e6 / 10e9 + 3e-5 + 28e-6)
    # Groups of equal local ranks share the node's link: eight times 3 pieces.
    between = Exchange(RankGroup(4, 1), 10**6)
    assert cluster.exchange_seconds(between) == pytest.approx(8 * 3e6 / 10e9 + 3e-5)
    # A straight send waits for one hop.
    straight = dataclasses.replace(between, is_straight=True)
    assert cluster.exchange_seconds(straight) == pytest.approx(8 * 3e6 / 10e9 + 1e-5)
    # Each of a node's 8 ranks sends a piece to the 24 ranks of the others, 192 in all through the node's link.
    everywhere = dataclasses.replace(flat, is_straight=True)
    assert cluster.exchange_seconds(everywhere) == pytest.approx(192e6 / 10e9 + 1e-5 + 1e-6)
    within = Exchange(RankGroup(1, 8), 10**6, passes=2)
    assert cluster.exchange_seconds(within) == pytest.approx(2 * (7e6 / 100e9 + 7e-6))
    assert cluster.exchange_seconds(Exchange(RankGroup(1, 1), 10**6)) == 0


def test_collectives_that_were_measured_take_as_long_as_then():
    curve = {"1000": 2e-3, "100000": 8e-3}  # bytes of a piece
    measured = {"all-gather 2x2": curve, "all-to-all 1x2": curve, "reduction 1x2": {"10": 9e-3}}
    rates = dict(within_gbytes=1, between_gbits=8, between_microseconds=0, entry_microseconds=500)
    cluster = dataclasses.replace(parse_cluster("2x2xH100@100"), **rates, collective_seconds=measured)

    def milliseconds(group: RankGroup, nbytes: int, **more: Any) -> float:
        return 1e3 * cluster.exchange_seconds(Exchange(group, nbytes, **more)) - 0.5

    flat, within = RankGroup(2, 2), RankGroup(1, 2)
    assert milliseconds(flat, 1) == pytest.approx(2)
    assert milliseconds(flat, 10_000) == pytest.approx(4)  # halfway between the two, by logarithms
    # 3 pieces of 10 MB take 30 ms over 1 GB/s between nodes, and as the largest measured piece does 800 ms.
    assert milliseconds(flat, 10_000_000) == pytest.approx(800)
    slow = dataclasses.replace(cluster, between_gbits=0.08)  # 10 MB/s: slower than when it was measured
    assert slow.exchange_seconds(Exchange(flat, 10_000_000)) == pytest.approx(3 + 0.5e-3, rel=1e-4)
    assert milliseconds(within, 1000, is_straight=True) == pytest.approx(2)
    assert milliseconds(within, 5, passes=2) == pytest.approx(9)
    # Nobody measured these: by the rates.
    assert milliseconds(within, 1_000_000) == pytest.approx(1 + cluster.within_microseconds / 1e3)
