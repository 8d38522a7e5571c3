"""Joining the process group, errors that all ranks report as one, and who makes which process group."""

import contextlib
import io
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from megatron_zpp.parallel import distributed
from megatron_zpp.parallel.distributed import FailedTogether, errors_on_all_ranks, init_distributed
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import ended, flags, start, torchrun


def _fail_on(ranks: dict[int, Exception]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            with errors_on_all_ranks():
                if dist.get_rank() in ranks:
                    raise ranks[dist.get_rank()]
        except FailedTogether:
            return err.getvalue()
    return "no error"


FAILURES: dict[str, dict[int, Exception]] = {  # by what rank 0 reports
    "no error": {},
    "error: rank 2: disk is full\n": {2: OSError("disk is\n  full")},
    "error: wrong\n": {rank: ValueError("wrong") for rank in range(3)},
    "error: rank 1: a\n": {1: ValueError("a"), 2: ImportError("b")},
}


def test_an_error_of_some_ranks_stops_all():
    found = run_in_turn(3, {report: partial(_fail_on, failing) for report, failing in FAILURES.items()})
    for report, of_ranks in found.items():
        silent = "no error" if not FAILURES[report] else ""
        assert of_ranks == [report, silent, silent]


Call = tuple[tuple[int, ...], bool]  # the members, and whether they alone make the group


def _calls(argv: list[str], architecture: str, is_bound: bool) -> list[Call]:
    """Return groups that a run makes. is_bound: whether the default group has a device, as a program's own may."""
    calls: list[Call] = []
    new_group = distributed_c10d.new_group

    def recorded(ranks=None, *args, use_local_synchronization=False, **more):
        members = range(dist.get_world_size()) if ranks is None else ranks
        is_split = distributed_c10d._get_default_group().bound_device_id is not None  # on NCCL
        calls.append((tuple(sorted(members)), use_local_synchronization and not is_split))
        return new_group(ranks, *args, use_local_synchronization=use_local_synchronization, **more)

    def refused(*args, **more):
        raise AssertionError("a split, which all ranks of the parent group must call")

    dist.group.WORLD.bound_device_id = torch.device("cuda", 0) if is_bound else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_get_split_source", lambda group: None)  # gloo would split
        for module in (dist, distributed_c10d, device_mesh):
            patch.setattr(module, "new_group", recorded)
        for module in (dist, distributed_c10d, device_mesh):
            patch.setattr(module, "split_group", refused)
        run, _ = start(argv, architecture)
        assert run.zeropp is not None
    return calls


def check(calls_of_ranks: list[list[Call]]) -> None:
    """Raise AssertionError where the ranks that make a group are not those that NCCL waits for."""
    of_all = [[call for call in calls if not call[1]] for calls in calls_of_ranks]
    assert all(calls == of_all[0] for calls in of_all), "groups that all ranks must make, in one order"
    for members in {members for calls in calls_of_ranks for members, is_local in calls if is_local}:
        times = [calls.count((members, True)) for calls in calls_of_ranks]
        expected = [times[members[0]] if rank in members else 0 for rank in range(len(times))]
        assert times == expected, f"{members} is made by {times} of the ranks"
    for first in range(len(calls_of_ranks)):
        for second in range(first):  # two ranks make the groups that both are in, in one order
            shared = [
                [call for call in calls_of_ranks[rank] if {first, second} <= set(call[0])] for rank in (first, second)
            ]
            assert shared[0] == shared[1]


@pytest.mark.parametrize("is_bound", [False, True], ids=["unbound", "bound"])
@pytest.mark.parametrize(
    "ranks, layout",
    [
        (8, "--pipeline-model-parallel-size 2 --num-experts 4 --moe-layer-freq 2 --expert-model-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2 --num-experts 4"),
        (4, "--context-parallel-size 2"),
    ],
)
def test_each_group_is_made_by_its_members_or_by_all(ranks, layout, is_bound):
    """A stage with experts beside one without; ranks of tensor and context parallelism."""
    zeropp = "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 2"
    if "tensor" in layout or "context" in layout:
        zeropp = zeropp.replace("node 2", "node 1")
    argv = flags("nowhere", zeropp, layout, "--attention-dropout 0 --hidden-dropout 0 --mock-data --vocab-size 64")
    argv = [word for word in argv if word not in ("--data-path", "nowhere", "--tokenizer-type", "ByteTokenizer")]
    calls = run_ranks(ranks, _calls, argv, "llama", is_bound)
    check(calls)
    if "experts" in layout:
        assert any(is_local for of_rank in calls for _, is_local in of_rank)


@pytest.mark.parametrize("device, ids", [("cuda:3", [3]), ("cpu", None)])
def test_a_barrier_is_told_the_device(monkeypatch, device, ids):
    """NCCL would take the rank's number for its GPU's, which it is not on nodes with fewer ranks than GPUs."""
    given = []
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: given.append(device_ids))
    distributed.wait_for_all_ranks(torch.device(device))
    assert given == [ids]


def test_the_default_group_is_bound_to_no_device(monkeypatch):
    """Else NCCL makes every other group by a split of it, which all ranks must call."""
    given = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given.update(device=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    device = distributed.init_distributed(None, 1)
    assert given["backend"] == "nccl" and given["device"] == device == torch.device("cuda", 0)
    assert given.get("device_id") is None


RESTARTED = """
import os
import socket
import torch
import torch.distributed as dist
from megatron_zpp.parallel.distributed import init_distributed

init_distributed("gloo", 0.5)
dist.all_reduce(ones := torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
print(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}: {ones.item():.0f} ranks", flush=True)
"""


def test_restarted_ranks_do_not_look_for_their_dead_predecessors(tmp_path):
    (script := tmp_path / "train.py").write_text(RESTARTED)
    out, _ = ended(torchrun(3, [], str(script), launcher=["--max-restarts", "1"]))
    assert out.count("start 1: 3 ranks") == 3


def test_nodes_whose_agents_count_restarts_apart_are_refused(monkeypatch):
    several = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (several | ranks).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"):
        init_distributed("gloo", 1.0)


def test_a_rank_whose_peers_never_start_says_so_in_one_line(data):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = torchrun(0, flags(data, "--distributed-timeout-minutes 0.02"), **alone)
    _, err = ended(process, status=2)
    assert err.startswith("error: rank 0 waited 1 s for the other ranks to start") and err.count("\n") == 1
