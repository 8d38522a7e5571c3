"""Elastic islands whose link is cut, and whose lighthouse dies: jobs of their own, in network namespaces or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cluster_in_a_box
from benchmarks.cluster_in_a_box import SUBNET, sh
from tests.conftest import ROOT
from tests.islands.elastic_jobs import (
    assert_same_bits,
    islands_of_one_job,
    lighthouse,
    logs_of,
    saved_by,
    start,
    wait_for,
    wake,
    words_of,
)
from tests.ranks import free_port, run_ranks

pytestmark = pytest.mark.long


def at_site(number: int, namespace: str, hosts: Path) -> list[str]:
    """Return a command that starts a program in the namespace, with its own host name."""
    script = f'mount --bind {hosts} /etc/hosts; hostname site{number}; exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]


def start_at(site: list[str], folder: Path, island: int, **more: object) -> subprocess.Popen:
    """Start one of three islands, of one rank, without the warm Python of other tests, which is in no namespace."""
    torchrun = f"-m torch.distributed.run --nproc-per-node 1 --master-addr site{island} --master-port 29501"
    words = [str(folder), str(island), "3", *words_of("site3:29510", timeout=5, **more)]
    command = [*site, sys.executable, *torchrun.split(), "tests/islands/elastic_island.py", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.usefixtures("namespaces_allowed")
def test_a_link_is_cut_and_comes_back(tmp_path, monkeypatch):
    """Island 1 loses the others and the lighthouse while it trains, and between hops: what is sent vanishes."""
    monkeypatch.setattr(cluster_in_a_box, "PREFIX", "cut")
    link, bridge = f"cut{os.getpid()}v1", f"cutbr{os.getpid()}"
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{SUBNET}.{site + 1} site{site}\n" for site in range(4)))
    with cluster_in_a_box.cluster(4, rate=None) as namespaces:
        *sites, home = [at_site(number, namespace, hosts) for number, namespace in enumerate(namespaces)]
        with lighthouse(29510, host=f"{SUBNET}.4", launcher=home):
            islands = [start_at(sites[island], tmp_path, island) for island in (0, 2)]
            islands.append(start_at(sites[1], tmp_path, 1, hold=7, hold_when_back=1))
            last = []  # synchronizations of island 1 before it was cut off
            for place in ("1.7", "1.back"):
                wait_for(tmp_path / f"{place}.holds", *islands)
                last.append(max(saved_by(tmp_path, 1)))
                sh(f"ip link set {link} nomaster")
                (tmp_path / f"{place}.goes").touch()
                wait_for(tmp_path / f"0.{last[-1] + 6}.outer", *islands)
                assert max(saved_by(tmp_path, 1)) == last[-1]  # it does not go on alone
                sh(f"ip link set {link} master {bridge}")
            logs = logs_of(*islands)
    change = "island 1 left; there are now islands 0, 2\n.* 1 came; there are now islands 0, 1, 2"
    for log in logs[:2]:
        assert re.search(f"{change}\n.*broke off.*\n.*{change}", log) and log.count("broke off") == 1
    first, third, second = (saved_by(tmp_path, island) for island in (0, 2, 1))
    assert first.keys() == third.keys() and max(first) == max(second) and last[0] == 6
    for step, value in first.items():
        is_away = any(cut < step <= cut + 6 for cut in last)
        assert (value["islands"] == 2) >= is_away and (step in second) == (value["islands"] == 3)
        assert_same_bits(value, third[step])
        assert_same_bits(value, second.get(step, value))


def test_the_lighthouse_restarts(tmp_path):
    """Between two synchronizations, while one island waits for the other: none is left behind, nothing is lost."""
    port = free_port()
    with lighthouse(port, min_islands=2) as at:
        waits, stopped = start(at, tmp_path, 0, 2, ranks=1, end=15), start(at, tmp_path, 1, 2, ranks=1, end=15, stop=7)
        wait_for(tmp_path / "1.7.stopped", waits, stopped)
    with lighthouse(port, min_islands=2):
        wake(tmp_path / "1.7.stopped")
        assert not any("left" in log for log in logs_of(waits, stopped))
    expected = run_ranks(2, islands_of_one_job, 2, 0, 15)[0]
    assert max(expected) == 15
    for island in range(2):
        for step, values in expected.items():
            found = saved_by(tmp_path, island)[step]["parameters"]
            assert all(torch.equal(*both) for both in zip(found, values, strict=True))


def test_two_that_each_went_on_alone_synchronize_again(tmp_path):
    """A restarted lighthouse knows no others. One island synchronizes alone, then another, for the same step."""
    port = free_port()
    with lighthouse(port) as at:
        islands = [start(at, tmp_path, island, 2, ranks=1, bits=4, stop="7,10") for island in range(2)]
        for island in range(2):
            wait_for(tmp_path / f"{island}.7.stopped", *islands)
    for island in range(2):
        with lighthouse(port):
            wake(tmp_path / f"{island}.7.stopped")
            wait_for(tmp_path / f"{island}.10.stopped", *islands)
    with lighthouse(port, min_islands=2):
        for island in range(2):
            wake(tmp_path / f"{island}.10.stopped")
        log, _ = logs_of(*islands)
    assert "island 1 synchronized without the others, and will take over their state" in log
    first, second = (saved_by(tmp_path, island) for island in range(2))
    assert first[9]["islands"] == second[9]["islands"] == 1
    assert not torch.equal(first[9]["parameters"][0], second[9]["parameters"][0])
    assert first.keys() == second.keys() and max(first) > 12
    for step in first.keys() - {9}:
        assert_same_bits(first[step], second[step])
