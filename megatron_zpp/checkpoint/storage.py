"""Store torch.distributed.checkpoint's tensors as safetensors without any pickle.

DCP's writers pickle their index, and its safetensors writer holds a rank's shards twice in memory. Its
HuggingFaceStorageReader opens what is written here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_zpp.errors import describe_error
from megatron_zpp.zeropp.api import local_part

from .files import CheckpointError, write_shards
from .folder import FolderLock, begin, finish
from .index import Index, build_index, read_index
from .meta import open_in
from .tokenizer import copy_tokenizer

MAX_NAMES = 20  # tensors with NaN or Inf that meta.json lists


@dataclass
class Layout:
    """Where the saves before put this rank's shards, and on rank 0 all ranks' shards. A save that fails spoils it."""

    proposed: list[WriteItem] | None = None  # by this rank
    items: list[WriteItem] = field(default_factory=list)  # as rank 0 gave them back, each replicated tensor to one rank
    index: dict[str, bytes] = field(default_factory=dict)  # files of the index, on rank 0


class CachedPlanner(DefaultSavePlanner):
    """Plans a save; where no rank's shards differ from the save before, ranks send neither plans nor places.

    DCP can cache plans, too, but keeps all ranks' plans on rank 0, a kilobyte for each shard; this keeps the index
    there, 48 bytes for each shard of a matrix.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout) -> None:
        super().__init__(flatten_state_dict=False)
        self.group, self.layout, self.is_known = group, layout, False

    def create_local_plan(self) -> SavePlan:
        items = None
        try:
            items = super().create_local_plan().items
        finally:  # others wait for this rank, also if it fails
            same = torch.tensor(int(items is not None and items == self.layout.proposed))
            dist.all_reduce(same, dist.ReduceOp.MIN, self.group)
        self.is_known, self.layout.proposed = bool(same), items
        return SavePlan([] if self.is_known else items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = all_plans if self.is_known else super().create_global_plan(all_plans)[0]
        return plans, Metadata({})  # DCP sends this to all ranks, who need no shards of all ranks

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self.is_known:
            self.layout.items = new_plan.items
        return super().finish_plan(SavePlan(self.layout.items, new_plan.storage_data))


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint: every rank its own file; rank 0 also index, meta.json, marker, and the name."""

    def __init__(
        self, folder: str, iteration: int, meta: dict[str, Any], lock: FolderLock | None, after: Callable[[], None]
    ) -> None:
        """meta, lock, after: used on rank 0. meta: meta.json without files. after: called on completion."""
        super().__init__(folder)
        self.folder, self.iteration, self.meta, self.lock, self.after = folder, iteration, meta, lock, after
        self.nonfinite: list[str] = []  # names of tensors with NaN or Inf; set on completion, on rank 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if dist.get_rank() == 0:
            if self.lock is not None:
                self.lock.renew()
            self.incomplete = begin(self.folder, self.iteration)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.items = [plan.items for plan in plans]  # each rank's; empty if rank 0 knows them already
        paths = [self.incomplete / f"rank_{rank:05d}.safetensors" for rank in range(len(plans))]
        return [SavePlan(plan.items, path) for plan, path in zip(plans, paths, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; the result holds what ``write_shards`` returns, with places where they are new."""
        assert isinstance(planner, CachedPlanner)
        self.layout, results = planner.layout, []
        if plan.items:
            entry, nonfinite, first_bytes = write_shards(plan.storage_data, plan.items, planner.resolve_data)
            written = entry, nonfinite, [] if planner.is_known else first_bytes
            results = [WriteResult(MetadataIndex(plan.storage_data.name), entry["bytes"], written)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [(write.index.fqn, *write.storage_data) for rank in results for write in rank]
        if any(self.items):
            parts = zip(filter(None, self.items), written, strict=True)
            self.layout.index = build_index((name, items, firsts) for items, (name, _, _, firsts) in parts)
        self.nonfinite = _nonfinite_names(self.meta, {name for _, _, names, _ in written for name in names})
        files = {name: entry for name, entry, *_ in written} | copy_tokenizer(self.meta["settings"], self.incomplete)
        finish(self.incomplete, self.layout.index, self.meta | {"nonfinite": self.nonfinite}, files)
        try:
            self.after()
        except (OSError, CheckpointError) as error:  # this checkpoint is complete
            why = describe_error(error)
            print(f"note: old checkpoints in {self.folder} stay, deleting them failed: {why}", flush=True)


def _nonfinite_names(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """List what is not finite for meta.json: what the run named (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


def read_state(index: Index, state: Mapping[str, Tensor]) -> None:
    """Fill this rank's part of ``state``, with any sharding, file by file. Raises CheckpointError, OSError, ValueError.

    Not by ``dcp.load``, whose rank 0 gathers the plans of all ranks and sends them back.
    """
    parts = sorted((part for each in state.items() for part in index.parts(*each)), key=itemgetter(0))
    for file_name, in_file in groupby(parts, itemgetter(0)):
        with open_in(index.checkpoint, file_name) as file:
            for _, first_byte, shape, source, target in in_file:
                content = bytearray(math.prod(shape) * target.itemsize)
                file.seek(first_byte)
                if file.readinto(content) != len(content):
                    raise CheckpointError(f"{file_name} is damaged: it is cut short")
                target.copy_(torch.frombuffer(content, dtype=target.dtype).view(shape)[source])


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors whose names begin with ``prefix``, without it, one at a time. Raises CheckpointError."""
    index = read_index(checkpoint, meta)
    for name in sorted(index.tensors):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_tensor(index, name)


iterate_parameters = partial(iterate_tensors, prefix="model.")  # fp32; a tied one comes once


def read_tensor(index: Index, name: str) -> Tensor:
    """Read one whole tensor. Raises CheckpointError, OSError, ValueError."""
    whole = torch.empty(index.tensors[name].size, dtype=index.tensors[name].dtype)
    read_state(index, {name: whole})
    return whole


def fill_rows(tensor: Tensor, saved: Tensor, count: int, others: str) -> None:
    """Fill this rank's part of ``tensor`` [rows, ...] with the first ``count`` rows of ``saved``.

    others: rows from ``count`` on become the "mean" of these rows, or stay as they are ("random").
    """
    (part,) = _create_chunk_list(tensor)
    local = local_part(tensor).detach()
    first, saved = part.offsets[0], saved[:count]
    if others == "mean":
        local.copy_(saved.mean(0).expand_as(local))
    rows = saved[first : first + len(local)]
    local[: len(rows)].copy_(rows)


def save_tensors(
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    meta: dict[str, Any],
    iteration: int = 0,
) -> Path:
    """Save a checkpoint of whole fp32 tensors, one in memory at a time, without a process group. Returns its folder.

    shapes: by name, "model.NAME" or "optimizer.NAME.KEY". read: returns a tensor by name. meta: as in ``Trainer.meta``.
    """
    path = begin(folder, iteration) / "rank_00000.safetensors"
    tensors = {key: torch.empty(shape, dtype=torch.float32, device="meta") for key, shape in shapes.items()}
    items = [item for key, tensor in tensors.items() for item in _create_write_items(key, tensor)]
    entry, nonfinite, first_bytes = write_shards(path, items, lambda item: read(item.index.fqn))
    meta = meta | {"iteration": iteration, "world_size": 1, "has_rng": False, "zeropp": None}
    meta["has_optimizer"] = any(key.startswith("optimizer.") for key in shapes)
    meta["nonfinite"] = _nonfinite_names(meta, nonfinite)
    files = {path.name: entry} | copy_tokenizer(meta["settings"], path.parent)
    return finish(path.parent, build_index([(path.name, items, first_bytes)]), meta, files)
