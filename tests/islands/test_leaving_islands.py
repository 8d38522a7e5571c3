"""Islands that are killed, fall silent, and return: jobs of their own under torchrun, and their lighthouse."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_zpp.islands.elastic.channel import MAGIC
from tests.conftest import ROOT
from tests.islands.leaving_island import INTERVAL, batch_of, build_model
from tests.islands.leaving_jobs import (
    Kept,
    assert_same_bits,
    islands_of_one_job,
    kept,
    lighthouse,
    run_commands_of_page,
    said,
    start,
    wait_for,
    wait_for_asking,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.long


def diloco(left_at: dict[int, int], returned_at: dict[int, int], end: int, islands: int = 3) -> dict[int, Kept]:
    """What is agreed on behind each step: copies of a model in plain loops, some of which are not there for a while.

    Behind ``left_at`` the others no longer count an island. Behind ``returned_at`` it has what they agree on there, and
    a new optimizer; ``end`` is the last step.
    """
    agreed = build_model(0)
    outer = torch.optim.SGD(agreed.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = {island: copy.deepcopy(agreed) for island in range(islands)}
    inner = {island: torch.optim.AdamW(model.parameters(), lr=0.001) for island, model in models.items()}
    found = {}
    for step in range(1, end + 1):
        for island, model in models.items():
            inputs, targets = batch_of(island, step)
            inner[island].zero_grad()
            (model(inputs) - targets).square().mean().backward()
            inner[island].step()
        if step % INTERVAL:
            continue
        for island in (island for island, left in left_at.items() if left == step):
            del models[island], inner[island]
        for parameter, *own in zip(agreed.parameters(), *(m.parameters() for m in models.values()), strict=True):
            parameter.grad = sum(parameter.detach() - p.detach() for p in own) / len(own)
        outer.step()
        for island in (island for island, returned in returned_at.items() if returned == step):
            models[island] = build_model(0)
            inner[island] = torch.optim.AdamW(models[island].parameters(), lr=0.001)
        for model in models.values():
            model.load_state_dict(agreed.state_dict())
        found[step] = {
            "agreed": [p.detach().clone() for p in agreed.parameters()],
            "momentum": [outer.state[p]["momentum_buffer"].clone() for p in agreed.parameters()],
        }
    return found


def assert_near(mine: Kept, expected: Kept) -> None:
    for kind in ("agreed", "momentum"):
        for value, its in zip(mine[kind], expected[kind], strict=True):
            torch.testing.assert_close(value, its, rtol=1e-3, atol=1e-4)


def loss_of(parameters: list[Tensor]) -> float:
    """Of batches that nobody trains on."""
    model = build_model(0)
    with torch.no_grad():
        for mine, value in zip(model.parameters(), parameters, strict=True):
            mine.copy_(value)
        return sum((model(x) - y).square().mean().item() for x, y in (batch_of(50, step) for step in range(20)))


def test_a_killed_island_is_left_behind_and_returns(tmp_path):
    """SIGKILL of all its ranks between two agreements; then it is started again."""
    with lighthouse() as at:
        stay = [start(at, tmp_path, island, 3) for island in (0, 2)]
        leaves = start(at, tmp_path, 1, 3, kill=7)
        assert leaves.wait(120) != 0
        wait_for(tmp_path / f"0.{3 * INTERVAL}.agreed", *stay)  # and they go on
        before = kept(tmp_path, 1)
        returns = start(at, tmp_path, 1, 3)
        logs = [said(island) for island in (*stay, returns)]
    for log in logs[:2]:
        assert re.search(r"island 1 left; there are now islands 0, 2\n.* 1 came; there are now islands 0, 1, 2", log)
    first, third = kept(tmp_path, 0), kept(tmp_path, 2)
    second = {step: value for step, value in kept(tmp_path, 1).items() if step not in before}
    returned_at, end = min(second), max(first)
    assert sorted(before) == [0, 3, 6] and sorted(second) == [end - 6, end - 3, end]
    expected = diloco({1: 9}, {1: returned_at}, end)
    for step, mine in first.items():
        assert mine["islands"] == (3 if step < 9 or step >= returned_at else 2)
        for other in (third[step], (before | second).get(step, mine)):
            assert_same_bits(mine, other)
        if step:
            assert_near(mine, expected[step])
    assert loss_of(first[end]["agreed"]) < loss_of(first[9]["agreed"]) < loss_of(first[0]["agreed"])


def test_a_kill_between_the_hops_begins_the_agreement_again(tmp_path):
    """In 4 bits with LoCo; until then all is as in one job, to the bit."""
    with lighthouse() as at:
        stay = [start(at, tmp_path, island, 3, bits=4) for island in (0, 2)]
        leaves = start(at, tmp_path, 1, 3, bits=4, kill_between=9)
        assert leaves.wait(120) != 0
        wait_for(tmp_path / "2.9.agreed", *stay)
        returns = start(at, tmp_path, 1, 3, bits=4)
        logs = [said(island) for island in (*stay, returns)]
    for log in logs[:2]:
        assert re.search(r"the agreement of islands 0, 1, 2 broke off.*\n.*island 1 left.*\n.*island 1 came", log)
    first, third, all_of_second = (kept(tmp_path, island) for island in (0, 2, 1))
    assert first[9]["islands"] == 2
    assert first.keys() == third.keys() and {0, 3, 6, max(first)} <= all_of_second.keys()
    for island in (third, all_of_second):
        for step, value in island.items():
            assert_same_bits(first[step], value)
    expected = run_ranks(6, islands_of_one_job, 3, 4, 6)[0]
    for step, values in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(first[step]["agreed"], values, strict=True))


def test_a_silent_island_is_left_behind_and_goes_on_when_it_wakes(tmp_path):
    """Stopped, not killed: it finds by itself that the others have gone on."""
    with lighthouse() as at:
        stays = start(at, tmp_path, 0, 2, ranks=1)
        silent = start(at, tmp_path, 1, 2, ranks=1, stop=7)
        wait_for(tmp_path / "0.12.agreed", stays, silent)
        assert not (tmp_path / "1.9.agreed").exists()
        os.kill(int((tmp_path / "1.7.stopped").read_text()), signal.SIGCONT)
        log = said(stays)
        said(silent)
    assert re.search(r"island 1 left; there are now island 0\n.*island 1 came; there are now islands 0, 1", log)
    first, second = kept(tmp_path, 0), kept(tmp_path, 1)
    assert max(first) == max(second) > 15
    for step, value in second.items():
        assert_same_bits(first[step], value)


def test_one_that_returns_while_another_is_lost_adds_nothing(tmp_path):
    """It has got the others' state when their agreement breaks off and begins again."""
    with lighthouse() as at:
        first, leaves = (start(at, tmp_path, i, 3, ranks=1, end=9, hold=8, kill_between=9 * i) for i in range(2))
        silent = start(at, tmp_path, 2, 3, ranks=1, end=9, stop=4)
        wait_for(tmp_path / "0.8.holds", first, leaves, silent)
        os.kill(int((tmp_path / "2.4.stopped").read_text()), signal.SIGCONT)
        wait_for_asking(at, 1)  # or the first two agree without it
        for island in range(2):
            (tmp_path / f"{island}.8.goes").touch()
        assert leaves.wait(120) != 0
        log = said(first)
        said(silent)
    assert re.search(r"island 2 left.*\n.*island 2 came.*\n.*broke off.*\n.*island 1 left", log), log
    mine, its = kept(tmp_path, 0)[9], kept(tmp_path, 2)[9]
    assert mine["islands"] == 2
    assert_same_bits(mine, its)
    assert_near(mine, diloco({2: 6, 1: 9}, {}, 9)[9])


def test_islands_that_all_end_begin_again_where_they_agreed(tmp_path):
    """Each from its last checkpoint by torch.distributed.checkpoint; one of them is of before the last agreement."""
    with lighthouse() as at:
        for island in [start(at, tmp_path, number, 2, end=8) for number in range(2)]:
            said(island)
        again = tmp_path / "again"
        again.mkdir()
        resumes = [tmp_path / "0.3.state", tmp_path / "1.6.state"]
        for island in [start(at, again, number, 2, end=12, resume=resumes[number]) for number in range(2)]:
            said(island)
    for number in range(2):
        assert sorted(kept(again, number)) == [6, 9, 12]
        assert_same_bits(kept(again, number)[6], kept(tmp_path, 1)[6])
        assert_same_bits(kept(again, number)[12], kept(again, 0)[12])


def test_an_island_that_does_not_fit_ends_alone(tmp_path):
    with lighthouse() as at:
        stays = [start(at, tmp_path, island, 2, ranks=1, kill=9 * island) for island in range(2)]
        stays, leaves = stays
        assert leaves.wait(120) != 0
        wait_for(tmp_path / "0.9.agreed", stays)
        other = start(at, tmp_path, 1, 2, ranks=1, bits=4)
        _, err = other.communicate(timeout=100)
        assert other.returncode != 0 and "start all islands alike" in err
        twin = start(at, tmp_path, 0, 2, ranks=1)
        _, err = twin.communicate(timeout=100)
        assert twin.returncode != 0 and "island 0 is there already" in err
        returns = start(at, tmp_path, 1, 2, ranks=1)
        log = said(stays)
        said(returns)
    assert "start all islands alike" in log
    assert_same_bits(*(kept(tmp_path, island)[max(kept(tmp_path, 0))] for island in range(2)))


def test_islands_that_count_others_differently_are_told_so(tmp_path):
    """At once, on both: nobody can tell which one is wrong."""
    with lighthouse() as at:
        both = [start(at, tmp_path, island, 2 + island, ranks=1) for island in range(2)]
        for island in both:
            _, err = island.communicate(timeout=60)
            assert island.returncode != 0
            assert "given as 2 by island 0, 3 by island 1: give all the same --islands" in err


class Shell:
    """What a stranger would have a trainer unpickle."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def listening_ports(process: int) -> set[int]:
    """Of a process, as Linux says."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_stranger_who_reaches_every_port_runs_nothing_and_stops_nobody(tmp_path):
    """It says that it is an island far ahead, and offers a pickle as the state to take; it does not know the secret."""
    ran = tmp_path / "ran"
    evil = pickle.dumps({"step": 10**6, "state": Shell(f"touch {ran}")})
    join = json.dumps({"island": 1, "job": "x", "ask": {"agreements": 10**6, "steps": 10**6}}).encode()
    with lighthouse() as at:
        islands = [start(at, tmp_path, island, 2, ranks=1, end=15, hold=7) for island in range(2)]
        for number in range(2):
            wait_for(tmp_path / f"{number}.7.holds", *islands)
        ports = set().union(*(listening_ports(int(file.read_text())) for file in tmp_path.glob("*.7.holds")))
        assert len(ports) >= 2
        for port in (*ports, int(at.rpartition(":")[2])):
            for said in (evil, b"GET /checkpoint/1000000/full HTTP/1.1\r\n\r\n", MAGIC + bytes(64) + join + evil):
                with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                    stranger.settimeout(1)
                    stranger.sendall(said + bytes(100))
                    while stranger.recv(4096):
                        pass
        for number in range(2):
            (tmp_path / f"{number}.7.goes").touch()
        logs = [island.communicate(timeout=150)[1] for island in islands]
        assert [island.returncode for island in islands] == [0, 0]
    assert not ran.exists()
    for log in logs:
        assert log.count("refused a connection from 127.0.0.1") == 1
        assert "left" not in log
    for step in (9, 12, 15):
        assert kept(tmp_path, 0)[step]["islands"] == 2
        assert_same_bits(kept(tmp_path, 0)[step], kept(tmp_path, 1)[step])


def test_the_commands_of_the_page_work():
    """Three islands of two ranks, as docs/islands.md starts them; their losses fall."""
    out = run_commands_of_page(1, "kill %1\nwait", ROOT)  # the trainer's come first
    for island in range(3):
        losses = re.findall(rf"^island {island} of 3, step \d+: loss ([\d.]+)", out, flags=re.MULTILINE)
        assert len(losses) == 8 and float(losses[-1]) < 0.96 * float(losses[0])
