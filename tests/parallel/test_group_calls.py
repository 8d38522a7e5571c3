"""Who makes which process group: on NCCL a group that not all of its callers make hangs, which gloo does not show."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from megatron_zpp.parallel import distributed
from tests.ranks import run_ranks
from tests.training.small_run import flags, start

Call = tuple[tuple[int, ...], bool]  # the members, and whether they alone make the group


def _calls(argv: list[str], architecture: str, is_bound: bool) -> list[Call]:
    """Those of a run that is built. is_bound: whether the default group has a device, as a program's own may."""
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
        assert run.zeropps
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


def test_the_check_finds_a_group_that_only_some_of_its_members_make():
    whole, pair = ((0, 1), False), ((0, 1), True)
    check([[whole, pair], [whole, pair]])
    for wrong in ([[whole, pair], [whole]], [[whole], []], [[whole, pair], [pair, whole]]):
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.parametrize("device, ids", [("cuda:3", [3]), ("cpu", None)])
def test_a_barrier_is_told_the_device(monkeypatch, device, ids):
    """NCCL would take the rank's number for that of its GPU, which it is not on nodes with fewer ranks than GPUs."""
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
