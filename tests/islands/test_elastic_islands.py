"""Elastic islands that are killed, stopped or cut off, and return; and their lighthouse, which dies, too."""

import copy
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cluster_in_a_box
from benchmarks.cluster_in_a_box import SUBNET, sh
from megatron_zpp.islands.elastic.channel import MAGIC
from megatron_zpp.islands.elastic.lighthouse import status
from tests.conftest import ROOT
from tests.islands.elastic_island import INTERVAL, batch_of, build_model, train_step
from tests.islands.elastic_jobs import (
    Saved,
    assert_same_bits,
    islands_of_one_job,
    lighthouse,
    logs_of,
    run_commands_of_page,
    saved_by,
    secret_file,
    start,
    wait_for,
    wait_until,
    wake,
    words_of,
)
from tests.islands.test_channel import Shell
from tests.ranks import free_port, run_ranks

pytestmark = pytest.mark.long


def diloco(left_at: dict[int, int], returned_at: dict[int, int], end: int) -> dict[int, Saved]:
    """Return the outer state after each synchronization of three islands in plain loops, some of which are away.

    From the end of step ``left_at`` the others no longer count an island. At ``returned_at`` it takes over their outer
    state with a new optimizer.
    """
    outer_model = build_model(0)
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(outer_model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.001)

    islands, found = {island: begin() for island in range(3)}, {}
    for step in range(1, end + 1):
        for island, (model, optimizer) in islands.items():
            train_step(model, optimizer, island, step)
        if step % INTERVAL:
            continue
        islands = {island: pair for island, pair in islands.items() if left_at.get(island) != step}
        models = [model for model, _ in islands.values()]
        for parameter, *own in zip(outer_model.parameters(), *(m.parameters() for m in models), strict=True):
            parameter.grad = sum(parameter.detach() - p.detach() for p in own) / len(own)
        outer.step()
        for model in models:
            model.load_state_dict(outer_model.state_dict())
        islands |= {island: begin() for island, returned in returned_at.items() if returned == step}
        found[step] = {
            "parameters": [p.detach().clone() for p in outer_model.parameters()],
            "momentum": [outer.state[p]["momentum_buffer"].clone() for p in outer_model.parameters()],
        }
    return found


def assert_near(mine: Saved, expected: Saved) -> None:
    for kind in ("parameters", "momentum"):
        for value, its in zip(mine[kind], expected[kind], strict=True):
            torch.testing.assert_close(value, its, rtol=1e-3, atol=1e-4)


def loss_of(parameters: list[Tensor]) -> float:
    """Compute the loss on batches that nobody trains on."""
    model = build_model(0)
    with torch.no_grad():
        for mine, value in zip(model.parameters(), parameters, strict=True):
            mine.copy_(value)
        return sum((model(x) - y).square().mean().item() for x, y in (batch_of(50, step) for step in range(20)))


def test_a_killed_island_is_left_behind_and_returns(tmp_path):
    """SIGKILL of all its ranks between two synchronizations; then it is started again."""
    with lighthouse() as at:
        stay = [start(at, tmp_path, island, 3) for island in (0, 2)]
        assert start(at, tmp_path, 1, 3, kill=7).wait(120) != 0
        wait_for(tmp_path / f"0.{3 * INTERVAL}.outer", *stay)  # and they go on
        before = saved_by(tmp_path, 1)
        logs = logs_of(*stay, start(at, tmp_path, 1, 3))
    for log in logs[:2]:
        assert re.search(r"island 1 left; there are now islands 0, 2\n.* 1 came; there are now islands 0, 1, 2", log)
    first, third = saved_by(tmp_path, 0), saved_by(tmp_path, 2)
    second = {step: value for step, value in saved_by(tmp_path, 1).items() if step not in before}
    returned_at, end = min(second), max(first)
    assert sorted(before) == [0, 3, 6] and sorted(second) == [end - 6, end - 3, end]
    expected = diloco({1: 9}, {1: returned_at}, end)
    for step, mine in first.items():
        assert mine["islands"] == (3 if step < 9 or step >= returned_at else 2)
        for other in (third[step], (before | second).get(step, mine)):
            assert_same_bits(mine, other)
        if step:
            assert_near(mine, expected[step])
    assert loss_of(first[end]["parameters"]) < loss_of(first[9]["parameters"]) < loss_of(first[0]["parameters"])


def test_a_kill_between_the_hops_restarts_the_synchronization(tmp_path):
    """In 4 bits with LoCo; until then all is as in one job, to the bit."""
    with lighthouse() as at:
        stay = [start(at, tmp_path, island, 3, bits=4) for island in (0, 2)]
        assert start(at, tmp_path, 1, 3, bits=4, kill_between=9).wait(120) != 0
        wait_for(tmp_path / "2.9.outer", *stay)
        logs = logs_of(*stay, start(at, tmp_path, 1, 3, bits=4))
    for log in logs[:2]:
        assert re.search(r"the synchronization of islands 0, 1, 2 broke off.*\n.*island 1 left.*\n.*island 1 came", log)
    first, third, all_of_second = (saved_by(tmp_path, island) for island in (0, 2, 1))
    assert first[9]["islands"] == 2
    assert first.keys() == third.keys() and {0, 3, 6, max(first)} <= all_of_second.keys()
    for step, value in [*third.items(), *all_of_second.items()]:
        assert_same_bits(first[step], value)
    for step, values in run_ranks(6, islands_of_one_job, 3, 4, 6)[0].items():
        assert all(torch.equal(a, b) for a, b in zip(first[step]["parameters"], values, strict=True))


def test_an_island_that_others_cannot_reach_ends_alone(tmp_path):
    """It returns, asks the lighthouse, and listens where nobody can connect."""
    with lighthouse(min_islands=2) as at:
        stay = [start(at, tmp_path, island, 3, ranks=1, hold=9, end=15) for island in (1, 2)]
        assert start(at, tmp_path, 0, 3, ranks=1, kill=4).wait(120) != 0
        for island in (1, 2):
            wait_for(tmp_path / f"{island}.9.holds", *stay)
        back = start(at, tmp_path, 0, 3, ranks=1, unreachable=1, timeout=3)
        secret = Path(secret_file()).read_text().strip().encode()
        wait_until(lambda: 0 in status(at, secret)["asking"], back, *stay)
        for island in (1, 2):
            (tmp_path / f"{island}.9.goes").touch()
        assert_fails(back, "2 other islands cannot reach island 0 at 127.0.0.1:1: can they connect there")
        for log in logs_of(*stay):
            assert log.count("broke off, and starts again: island 0 at 127.0.0.1:1") >= 2
    assert_same_bits(saved_by(tmp_path, 1)[15], saved_by(tmp_path, 2)[15])


def assert_fails(island, message: str) -> None:
    _, err = island.communicate(timeout=100)
    assert island.returncode != 0 and message in err, err


def test_islands_that_disagree_on_their_number_all_end(tmp_path):
    """Nobody can tell which one is wrong."""
    with lighthouse() as at:
        for island in [start(at, tmp_path, island, 2 + island, ranks=1) for island in range(2)]:
            assert_fails(island, "given as 2 by island 0, 3 by island 1: give all the same --islands")


def listening_ports(process: int) -> set[int]:
    """Return a process's listening ports, from Linux's tables."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_stranger_who_reaches_every_port_runs_nothing_and_stops_nobody(tmp_path):
    """It claims to be an island far ahead, and offers a pickle as its state; it does not know the secret."""
    ran = tmp_path / "ran"
    evil = pickle.dumps({"step": 10**6, "state": Shell(ran)})
    join = json.dumps({"island": 1, "job": "x", "ask": {"num_syncs": 10**6, "steps": 10**6}}).encode()
    with lighthouse() as at:
        islands = [start(at, tmp_path, island, 2, ranks=1, end=15, hold=7) for island in range(2)]
        for number in range(2):
            wait_for(tmp_path / f"{number}.7.holds", *islands)
        ports = set().union(*(listening_ports(int(file.read_text())) for file in tmp_path.glob("*.7.holds")))
        assert len(ports) >= 2
        for port in (*ports, int(at.rpartition(":")[2])):
            for hello in (evil, b"GET /checkpoint/1000000/full HTTP/1.1\r\n\r\n", MAGIC + bytes(64) + join + evil):
                with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                    stranger.settimeout(1)
                    stranger.sendall(hello + bytes(100))
                    while stranger.recv(4096):
                        pass
        for number in range(2):
            (tmp_path / f"{number}.7.goes").touch()
        errors = [island.communicate(timeout=150)[1] for island in islands]
        assert [island.returncode for island in islands] == [0, 0]
    assert not ran.exists()
    for log in errors:
        assert log.count("refused a connection from 127.0.0.1") == 1 and "left" not in log
    for step in (9, 12, 15):
        assert saved_by(tmp_path, 0)[step]["islands"] == 2
        assert_same_bits(saved_by(tmp_path, 0)[step], saved_by(tmp_path, 1)[step])


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


def test_the_commands_of_the_page_work():
    """Three islands of two ranks, as docs/how-to/elastic-islands.md starts them; their losses fall."""
    out = run_commands_of_page(1, "kill %1\nwait", ROOT)  # the trainer's come first
    for island in range(3):
        losses = re.findall(rf"^island {island} of 3, step \d+: loss ([\d.]+)", out, flags=re.MULTILINE)
        assert len(losses) == 8 and float(losses[-1]) < 0.96 * float(losses[0])
