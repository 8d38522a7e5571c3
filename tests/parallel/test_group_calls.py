"""Which ranks make each process group: on NCCL, one that is missing leaves the others waiting forever.

Either all ranks of the world make a group, in one order, or exactly its members do (``use_local_synchronization``). The
members suffice only while the world is bound to no device; else NCCL splits its communicator, which takes all ranks.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from megatron_zpp.training.pretrain import train
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, write_text

Ranks = tuple[int, ...]
Call = tuple[Ranks, bool]  # the group's members; whether they alone make it

EXPERTS = "--num-experts 4 --moe-router-topk 1"
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients --zero-ranks-per-node 2"
PP2, EP2 = "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
ONE_STAGE = f"--num-layers 2 {PP2} --untie-embeddings-and-output-weights {EXPERTS} --moe-first-layer 2"
LAYOUTS = {
    "experts in one of two stages": f"{ONE_STAGE} {EP2} {QUANTIZED}",
    "the same, cp 2": f"{ONE_STAGE} {EP2} {QUANTIZED} --context-parallel-size 2",
    "the same, tp 2": f"{ONE_STAGE} {EP2} --tensor-model-parallel-size 2 --zero-stage 1",
    "HSDP": "--num-layers 2 --num-distributed-optimizer-instances 2",
    "islands": f"--num-layers 2 --islands 2 --island-sync-interval 1 {QUANTIZED}",
}


def _recorded(make: Any, calls: list[Call]) -> Any:
    """Wrap ``_new_group_with_tag``, which makes all groups but those of ``split_group``."""

    def new_group(ranks: list[int] | None = None, *args: Any, **more: Any) -> Any:
        members = tuple(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        is_bound = distributed_c10d._get_default_group().bound_device_id is not None
        calls.append((members, more.get("use_local_synchronization", False) and not is_bound))
        return make(ranks, *args, **more)

    return new_group


def _calls_of(argv: list[str]) -> list[Call]:
    """Train a step, save, and return this rank's calls. The world is bound to a device, as the trainer's is on GPUs."""
    calls: list[Call] = []
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    with contextlib.ExitStack() as patches:
        for module, name, replacement in (
            (distributed_c10d, "_get_split_source", lambda group: None),  # gloo has none
            (distributed_c10d, "_new_group_with_tag", _recorded(distributed_c10d._new_group_with_tag, calls)),
            # Not reached without a GPU, where meshes make their groups one by one.
            (device_mesh, "split_group", mock.Mock(side_effect=AssertionError("split_group is not recorded"))),
            (dist, "split_group", mock.Mock(side_effect=AssertionError("split_group is not recorded"))),
        ):
            patches.enter_context(mock.patch.object(module, name, replacement))
        patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
        run, _ = start(argv)
        train(run, time.monotonic())
    return calls


def assert_members_call(calls_of_ranks: list[list[Call]]) -> None:
    """Raise AssertionError if making some group would wait for a rank that does not call."""
    of_all = [[ranks for ranks, is_local in calls if not is_local] for calls in calls_of_ranks]
    for rank, calls in enumerate(of_all):
        assert calls == of_all[0], f"ranks 0 and {rank} make other groups, or in another order"
    of_members = [Counter(ranks for ranks, is_local in calls if is_local) for calls in calls_of_ranks]
    for ranks in set().union(*of_members):
        callers = {rank: calls[ranks] for rank, calls in enumerate(of_members) if calls[ranks]}
        assert callers == dict.fromkeys(ranks, max(callers.values())), f"group {ranks} is made by {callers}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_is_made_by_all_ranks_or_by_its_members(layout, tmp_path):
    saves = f"--save {tmp_path / 'saved'} --save-interval 1"
    argv = flags(write_text(tmp_path), LAYOUTS[layout], saves, length="--train-iters 1")
    calls = run_ranks(8, _calls_of, argv)
    assert_members_call(calls)


@pytest.mark.parametrize(
    "calls, wrong",
    [
        ([[((0, 1), False)], [((0, 1), False)]], None),
        ([[((0,), True)], []], None),
        ([[((0, 1), False)], []], "ranks 0 and 1 make other groups"),
        ([[((0,), False), ((1,), False)], [((1,), False), ((0,), False)]], "in another order"),
        ([[((0, 1), True)], []], "made by {0: 1}"),
        ([[((0,), True)], [((0,), True)]], "made by {0: 1, 1: 1}"),
    ],
)
def test_a_missing_caller_is_found(calls, wrong):
    with pytest.raises(AssertionError, match=wrong) if wrong else contextlib.nullcontext():
        assert_members_call(calls)
