"""Measuring a cluster: whatever it finds, its ranks agree on it, and a plan can be made of it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.commands import measure_cluster as tool
from megatron_zpp.commands.measure_cluster import Options, measure_cluster
from megatron_zpp.planning import measure
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.measure import curve_name
from megatron_zpp.planning.needs.division import RankGroup
from tests.ranks import run_ranks
from tests.training.small_run import ended, torchrun

OPTIONS = Options(torch.device("cpu"), hidden_size=64, tokens=32, most_bytes=2**14, seconds=0.01)


MEASURE_QUICKLY = """
import sys
from functools import partial
from megatron_zpp.commands import measure_cluster

measure_cluster.Options = partial(measure_cluster.Options, most_bytes=2**14, seconds=0.01)
sys.exit(measure_cluster.main())
"""


def test_rates_and_latencies_are_those_of_the_links(monkeypatch):
    """Rings whose hops take 10 microseconds at 2 GB/s within nodes of 4, and 50 at 1 GB/s between 3 nodes."""
    links = {RankGroup(1, 4): (1e-5, 2e9), RankGroup(3, 1): (5e-5, 1e9)}

    def curves(groups, options):
        return {
            curve_name("all-gather", group): {
                str(nbytes): (group.size - 1) * (latency + nbytes / rate) for nbytes in (1, 2**20, 2**24)
            }
            for group, (latency, rate) in links.items()
        }

    monkeypatch.setattr(measure, "_measure_curves", curves)
    topology = SimpleNamespace(num_nodes=3, ranks_per_node=4, intra_group=None, inter_group=None, group=None)
    found = measure.measure_links(topology, OPTIONS)
    assert found["within_gbytes"] == pytest.approx(2, rel=1e-3)
    assert found["within_microseconds"] == pytest.approx(10, rel=1e-3)
    assert found["between_gbits"] == pytest.approx(4 * 8, rel=1e-3)  # out of a node: of 4 ranks
    assert found["between_microseconds"] == pytest.approx(50, rel=1e-3)


@pytest.mark.long
def test_ranks_return_the_same():
    cluster, *others = run_ranks(4, measure_cluster, 2, OPTIONS)
    assert all(other == cluster for other in others)
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 2)
    assert cluster.ring_passes == 2  # gloo
    assert max(cluster.efficiency, cluster.attention_efficiency) == 1  # the faster one's, as a CPU's peak is unknown
    assert 0 < cluster.layer_gbytes <= cluster.kernel_gbytes and cluster.step_microseconds > 0
    assert min(cluster.layer_microseconds, cluster.entry_microseconds) >= 0
    assert max(cluster.layer_microseconds, cluster.step_microseconds) < 1e5
    kinds, groups = ("all-gather", "all-to-all", "reduction"), ("1x2", "2x1", "2x2")
    assert set(cluster.collective_seconds) == {f"{kind} {group}" for kind in kinds for group in groups}
    for curve in cluster.collective_seconds.values():
        assert [int(size) for size in curve] == [4096, 16384] and min(curve.values()) > 0


@pytest.mark.long
def test_the_tool_writes_a_file_that_plans_take(tmp_path):
    output, program = tmp_path / "cluster.toml", tmp_path / "measure_quickly.py"
    program.write_text(MEASURE_QUICKLY)
    out, _ = ended(torchrun(2, ["--output", str(output), "--hidden-size", "64", "--tokens", "32"], str(program)))
    assert "\nlayer_gbytes = " in out and f"by size: {output}" in out
    assert parse_cluster(str(output)).gpu == "CPU" and "# Measured on " in output.read_text()


def test_without_ranks_it_says_how_to_start(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["measure_cluster.py", "--output", "x"])
    assert tool.main() == 2
    assert "start it under torchrun" in capsys.readouterr().err
