"""What ranks send rank 0 at a save: plans and places of shards only if they are others than in the save before."""

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_zpp.checkpoint import iterate_tensors, problems, read_meta, storage
from megatron_zpp.checkpoint.storage import CachedPlanner, CheckpointWriter, Layout
from tests.checkpoint.saved import meta_of
from tests.ranks import run_ranks

TENSORS, FAILING = 40, 5


def state_of(iteration: int) -> dict[str, torch.Tensor]:
    """Sharded and replicated tensors, whose values, and from iteration 3 also shapes, differ from the save before."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = 4 if iteration < 3 else 6
    state = {
        f"model.{i}": distribute_tensor(torch.full((6, wide), float(100 * iteration + i)), mesh, [Shard(0)])
        for i in range(TENSORS)
    }
    state["model.scale"] = torch.tensor([float(iteration)])
    if iteration >= 4 and dist.get_rank() == 1:  # as a unit's first error of feedback
        state["zeropp.1.error"] = torch.tensor([float(iteration)])
    return state


def save_each(folder: str) -> list[tuple[bool, int]]:
    """Save 7 iterations, of which one fails on rank 1; return whether each succeeded, and its bytes of objects."""
    group, layout, rows = dist.group.WORLD, Layout(), []
    to_tensor = distributed_c10d._object_to_tensor
    sent: list[int] = []

    def counted(*args):
        result = to_tensor(*args)
        sent.append(int(result[1]))
        return result

    def fails(*args):
        raise OSError("no space left")

    for iteration in range(1, 8):
        sent.clear()
        planner = CachedPlanner(group, layout)
        meta = meta_of(iteration) | {"iteration": iteration, "world_size": 2, "zeropp": None}
        meta |= {"has_optimizer": False, "has_rng": False}
        writer = CheckpointWriter(folder, iteration, meta, None, lambda: None)
        failing = iteration == FAILING and dist.get_rank() == 1
        write = fails if failing else storage.write_shards
        with (
            patch.object(distributed_c10d, "_object_to_tensor", counted),
            patch.object(storage, "write_shards", write),
        ):
            try:
                dcp.save(state_of(iteration), storage_writer=writer, planner=planner, process_group=group)
                rows.append((True, sum(sent)))
            except dcp.api.CheckpointException:
                layout = Layout()
                rows.append((False, sum(sent)))
    return rows


def test_a_save_like_the_one_before_sends_neither_plans_nor_places(tmp_path):
    for rows in run_ranks(2, save_each, str(tmp_path)):
        assert [saved for saved, _ in rows] == [iteration != FAILING for iteration in range(1, 8)]
        first, same, wider, one_more, _, after_failure, same_again = (nbytes for _, nbytes in rows)
        assert first > 5_000 and min(wider, one_more, after_failure) > first / 2  # all is sent again
        assert max(same, same_again) < first / 10
    for iteration in {*range(1, 8)} - {FAILING}:
        checkpoint = Path(tmp_path) / f"iter_{iteration:07d}"
        assert problems(checkpoint) == []
        wide = 4 if iteration < 3 else 6
        expected = {f"model.{i}": torch.full((6, wide), float(100 * iteration + i)) for i in range(TENSORS)}
        expected["model.scale"] = torch.tensor([float(iteration)])
        if iteration >= 4:
            expected["zeropp.1.error"] = torch.tensor([float(iteration)])
        tensors = dict(iterate_tensors(checkpoint, read_meta(checkpoint)))
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].equal(value) for name, value in expected.items())
