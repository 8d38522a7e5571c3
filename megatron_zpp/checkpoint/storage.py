"""Store torch.distributed.checkpoint's tensors as safetensors without any pickle.

DCP's writers pickle their index, and its safetensors writer holds a rank's shards twice in memory. Its
HuggingFaceStorageReader opens what is written here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_zpp.errors import describe_error
from megatron_zpp.zeropp.api import local_part

from .files import CheckpointError, write_safetensors
from .folder import FolderLock, begin, finish
from .index import Index, build_index, read_index
from .meta import open_in
from .tokenizer import copy_tokenizer

MAX_NAMES = 20  # tensors with NaN or Inf that meta.json lists


@dataclass
class Layout:
    """Where a save put this rank's shards, and on rank 0 all ranks' shards."""

    local: list[WriteItem]  # as this rank proposed them
    items: list[WriteItem] = field(default_factory=list)  # as rank 0 gave them back, each replicated tensor to one rank
    index: dict[str, bytes] = field(default_factory=dict)  # files of the index, on rank 0


class CachedPlanner(DefaultSavePlanner):
    """Plans a save; where no rank's shards differ from the save before, ranks send neither plans nor places.

    DCP can cache plans, too, but keeps all ranks' plans on rank 0, a kilobyte for each shard; this keeps the index
    there, 48 bytes for each shard of a matrix.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout | None) -> None:
        """layout: of the save before, which succeeded. Collective, as each save is."""
        super().__init__(flatten_state_dict=False)
        self.group, self.layout, self.is_known = group, layout, False

    def create_local_plan(self) -> SavePlan:
        items = None
        try:
            plan = super().create_local_plan()
            items = plan.items
        finally:  # others wait for this rank, also if it fails
            same = torch.tensor(int(self.layout is not None and items == self.layout.local))
            dist.all_reduce(same, dist.ReduceOp.MIN, self.group)
        self.is_known = bool(same)
        if self.is_known:
            return SavePlan([])
        self.layout = Layout(plan.items)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return (all_plans, Metadata({})) if self.is_known else super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assert self.layout is not None
        if not self.is_known:
            self.layout.items = new_plan.items
        return super().finish_plan(SavePlan(self.layout.items, new_plan.storage_data))


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its own file; rank 0 also index, meta.json, marker, and the name."""

    path: Path
    layout: Layout

    def __init__(
        self, folder: str, iteration: int, meta: dict[str, Any], lock: FolderLock | None, after: Callable[[], None]
    ) -> None:
        """meta, lock, after: used on rank 0. meta: meta.json without files. after: called on completion."""
        self.lock = lock
        self.folder, self.iteration, self.meta, self.after = folder, iteration, meta, after
        self.nonfinite: list[str] = []  # names of tensors with NaN or Inf; set on completion, on rank 0

    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.is_coordinator:
            if self.lock is not None:
                self.lock.renew()
            self.path = begin(self.folder, self.iteration)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [SavePlan(plan.items, self.path / f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; the result holds its file's name and entry, what is not finite, and new places."""
        assert isinstance(planner, CachedPlanner) and planner.layout is not None
        self.layout = planner.layout
        items = {item.index.fqn: item for item in plan.items}
        data = {name: item.tensor_data for name, item in items.items() if item.tensor_data is not None}
        assert len(data) == len(plan.items), "each item is a tensor, and a rank has one shard of each"
        results: list[WriteResult] = []
        if items:
            file = write_safetensors(
                plan.storage_data,
                [(name, shard.properties.dtype, tuple(shard.chunk.sizes)) for name, shard in data.items()],
                lambda name: planner.resolve_data(items[name]),  # type: ignore[arg-type,return-value]
                {name: tuple(shard.chunk.offsets) for name, shard in data.items()},
            )
            places = {} if planner.is_known else {items[name].index: place for name, place in file.places.items()}
            name = plan.storage_data.name
            results = [
                WriteResult(MetadataIndex(name), file.entry["bytes"], (name, file.entry, file.nonfinite, places))
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        all_places, files, all_nonfinite = {}, {}, set()
        for result in chain.from_iterable(results):
            name, entry, nonfinite, places = result.storage_data
            files[name] = entry
            all_places.update(places)
            all_nonfinite.update(nonfinite)
        self.nonfinite = _nonfinite_names(self.meta, all_nonfinite)
        files |= copy_tokenizer(self.meta["settings"], self.path)
        if all_places:
            self.layout.index = build_index(metadata.state_dict_metadata, all_places)
        metadata.state_dict_metadata = {}  # DCP sends this to all ranks, who need no shards of all ranks
        finish(self.path, self.layout.index, self.meta | {"nonfinite": self.nonfinite}, files)
        try:
            self.after()
        except (OSError, CheckpointError) as error:  # this checkpoint is complete
            print(
                f"note: old checkpoints in {self.folder} stay, deleting them failed: {describe_error(error)}",
                flush=True,
            )

    @classmethod
    def validate_checkpoint_id(cls, *args: Any, **kwargs: Any) -> bool:
        return True


def _nonfinite_names(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """List what is not finite for meta.json: what the run named (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


def _read_shard(file: Any, place: _StorageInfo, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    content = bytearray(place.length)
    file.seek(place.offset)
    if file.readinto(content) != len(content):
        raise CheckpointError(f"{place.relative_path} is damaged: it is cut short")
    return torch.frombuffer(content, dtype=dtype).view(sizes) if content else torch.empty(sizes, dtype=dtype)


def read_state(index: Index, state: dict[str, Any]) -> None:
    """Fill this rank's part of ``state``, with any sharding. Raises CheckpointError, OSError, ValueError.

    DCP plans what to read; not ``dcp.load``, whose rank 0 gathers the plans of all ranks and sends them back.
    """
    metadata = index.metadata_for(state)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata)
    by_file: dict[str, list[Any]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_file.items():
        with open_in(index.checkpoint, name) as file:
            for item in items:
                tensor = metadata.state_dict_metadata[item.storage_index.fqn]
                assert isinstance(tensor, TensorStorageMetadata)
                sizes = next(c.sizes for c in tensor.chunks if c.offsets == item.storage_index.offset)
                place, offsets = metadata.storage_data[item.storage_index], item.storage_offsets
                if sizes:  # only the rows that are needed, which lie side by side
                    row = place.length // sizes[0]
                    place = _StorageInfo(name, place.offset + offsets[0] * row, item.lengths[0] * row)
                    sizes, offsets = torch.Size((item.lengths[0], *sizes[1:])), (0, *offsets[1:])
                shard = _read_shard(file, place, tensor.properties.dtype, sizes)
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(shard, offsets, item.lengths))


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors whose names begin with ``prefix``, without it, one at a time. Raises CheckpointError."""
    index = read_index(checkpoint, meta)
    for name in sorted(index.tensors):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_tensor(index, name)


def read_tensor(index: Index, name: str) -> Tensor:
    """Read one whole tensor. Raises CheckpointError or OSError."""
    whole = torch.empty(index.tensors[name].size, dtype=index.tensors[name].dtype)
    for chunk, place in index.places(name, index.rows(name)):
        with open_in(index.checkpoint, place.relative_path) as file:
            shard = _read_shard(file, place, whole.dtype, chunk.sizes)
        narrow_tensor_by_index(whole, chunk.offsets, chunk.sizes).copy_(shard)
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
    path = begin(folder, iteration)
    name = "rank_00000.safetensors"
    file = write_safetensors(path / name, [(key, torch.float32, shape) for key, shape in shapes.items()], read)
    tensors, places = {}, {}
    for key, shape in shapes.items():
        size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
        chunks = [ChunkStorageMetadata(offsets, size)]
        tensors[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        places[MetadataIndex(key, offsets)] = file.places[key]
    meta = meta | {"iteration": iteration, "world_size": 1, "has_rng": False, "zeropp": None}
    meta["has_optimizer"] = any(key.startswith("optimizer.") for key in shapes)
    meta["nonfinite"] = _nonfinite_names(meta, file.nonfinite)
    return finish(path, build_index(tensors, places), meta, {name: file.entry} | copy_tokenizer(meta["settings"], path))
