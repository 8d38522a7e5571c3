"""Publish the weights of a model that trains: each rank writes what moved in its shards, and nothing is gathered."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_zpp.errors import attempt, describe_error
from megatron_zpp.files import lock_for_process, open_lock, open_regular
from megatron_zpp.zeropp.fsdp.topology import gather_objects
from megatron_zpp.zeropp.wire.moves import encode_moves

from .files import FORMAT, MOVES, NAMES, PublishError, manifest_path, pack, shards_name, versions_in, write_safetensors

T = TypeVar("T")


class Shard(NamedTuple):
    """This rank's part of a tensor, as published."""

    name: str
    shape: tuple[int, ...]  # the whole tensor's shape
    offsets: tuple[int, ...]  # where this part begins in it
    values: Tensor
    is_parameter: bool  # a buffer may be a mask, which holds Inf


class Publisher:
    """Publishes versions of a model's weights into a folder that all ranks share. All methods are collective.

    Any model, sharded by FSDP2, tensor or pipeline parallelism, or not at all. Floating-point parameters are published
    in ``dtype``, as mixed precision computes with them; persistent buffers as they are. If parameters are frozen, as
    with LoRA, only the others are published: readers have the frozen ones from elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        anchor_interval: int = 100,
        dtype: torch.dtype = torch.bfloat16,
        resume: bool = False,
    ) -> None:
        """Lock the folder. Raises PublishError on all ranks if another run publishes there.

        anchor_interval: versions from one anchor, which has all weights, to the next; what is older than the anchor
        before the latest is deleted. dtype: bf16 or fp16. resume: go on in a folder that has versions, with an anchor.
        """
        if dtype not in (torch.bfloat16, torch.float16) or anchor_interval < 1:
            raise PublishError(f"give bf16 or fp16 and an anchor_interval from 1 on, not {dtype} and {anchor_interval}")
        self.model, self.folder, self.dtype, self.anchor_interval = model, Path(folder), dtype, anchor_interval
        self.about: Callable[[], dict[str, Any]] = dict  # JSON beside the weights of an anchor, from rank 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        opened = _together(lambda: (self._open(resume), uuid.uuid4().hex) if self.rank == 0 else None)[0]
        assert opened is not None
        self.version, self._run = opened  # the last version in the folder, and a name for this run
        self._tried = self.version  # the last version that was begun: one that failed may have come to readers
        self._anchor = 0  # the latest of this run
        self._wire: Tensor | None = None  # this rank's values in ``version``; None: not of this run
        self._layout: list[tuple[int, torch.dtype]] = []  # number and dtype of the values
        keys = _together(lambda: [_key(shard) for shard in self._shards()])
        self._others = set().union(*keys[: self.rank])  # tensors that lower ranks hold too, and publish

    def _open(self, resume: bool) -> int:
        """Lock the folder; return its last version, 0 without one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self.folder / "lock")  # the system releases it when the process ends
        try:
            lock_for_process(self._lock, self.folder, "run publish")
        except BlockingIOError:
            why = f"another run publishes into {self.folder}: give this one another folder, or end that run"
            raise PublishError(why) from None
        last = max(versions_in(self.folder), default=0)
        if last and not resume:
            there = f"{self.folder} holds weights of another run, up to version {last}"
            raise PublishError(f"{there}: give an empty folder, or go on with that run")
        self._delete(lambda version: version > last)  # a killed run's unfinished files
        return last

    def _delete(self, is_unwanted: Callable[[int], bool]) -> None:
        """Delete versions, each one's manifest first. Leaves what cannot be deleted: the next anchor tries again."""
        for path in sorted(self.folder.glob("v????????.*")):
            if path.name[1:9].isdigit() and is_unwanted(int(path.name[1:9])):
                with contextlib.suppress(OSError):
                    path.unlink()

    def publish(self, step: int) -> int:
        """Publish the weights as they are after optimizer step ``step``; return their version.

        Raises PublishError on all ranks if one cannot write, or holds NaN or Inf; readers then see the version before,
        and nothing is left of this one on the disk.
        """
        version, old, old_layout = self._tried + 1, self._wire, self._layout
        base = None if old is None or version - self._anchor >= self.anchor_interval else self.version
        identity = {"run": self._run, "version": version, "base": base}
        self._tried, self._wire, wire = version, None, None  # so that an anchor follows a version that failed

        def write() -> tuple[str, dict[str, Any]] | None:
            nonlocal wire
            keyed = [(_key(shard), shard) for shard in self._shards()]
            keyed = [(key, shard) for key, shard in keyed if key not in self._others]
            shards = [shard for _, shard in keyed]
            for shard in shards:
                if shard.is_parameter and not shard.values.isfinite().all():
                    spoiled = f"{shard.name} has NaN or Inf in {self.dtype} after step {step}"
                    raise PublishError(f"{spoiled}: go on from an older checkpoint, or lower the learning rate")
            self._layout = [(key, shard.values.dtype) for key, shard in keyed]
            format, wire = pack((shard.values for shard in shards), self.dtype)
            metadata = {key: json.dumps(value) for key, value in identity.items()}
            tensors = {shard.name: shard.values for shard in shards}
            if base is None:
                places = {shard.name: [shard.shape, shard.offsets] for shard in shards}
                metadata |= {"dtype": NAMES[self.dtype], "places": json.dumps(places)}
            else:
                assert old is not None
                if self._layout != old_layout:
                    raise PublishError("parameters were added, frozen or sharded again: make another Publisher")
                tensors = {name: values for name, values in tensors.items() if values.dtype != self.dtype}
                tensors[MOVES] = encode_moves(format, old, wire)
            for name, tensor in tensors.items():
                if tensor.dtype not in NAMES:
                    raise PublishError(f"{name} is of {tensor.dtype}, which cannot be published")
            if not shards:
                return None
            kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
            path = self.folder / shards_name(version, self.rank)
            with attempt("publish weights as", path), open_regular(path, "wb") as file:
                return path.name, write_safetensors(file, kinds, tensors.__getitem__, metadata)[0]

        try:
            files = dict(filter(None, _together(write)))
            manifest = {"format": FORMAT, **identity, "step": step, "files": files}
            _together(lambda: self._commit(manifest) if self.rank == 0 else None)
        except Exception:
            if self.rank == 0:  # all ranks have written what they could
                self._delete(lambda number: number == version)
            raise
        self.version, self._wire = version, wire
        self._anchor = version if base is None else self._anchor
        return version

    def _commit(self, manifest: dict[str, Any]) -> None:
        path, is_anchor = manifest_path(self.folder, manifest["version"]), manifest["base"] is None
        incomplete = path.with_suffix(".incomplete")
        content = json.dumps(manifest | {"about": self.about() if is_anchor else {}})
        with attempt("publish weights as", path), open_regular(incomplete, "wb") as file:
            file.write(content.encode())
        os.replace(incomplete, path)
        if is_anchor:  # readers may still be at what the last anchor led to, but at nothing before it
            self._delete(lambda version: version < self._anchor)

    def _shards(self) -> list[Shard]:
        """Return this rank's parts of the published tensors, tied weights once."""
        state = self.model.state_dict(keep_vars=True)  # FSDP2 shards what passes have left gathered
        parameters = {id(tensor): tensor for tensor in state.values() if isinstance(tensor, nn.Parameter)}
        has_frozen = not all(parameter.requires_grad for parameter in parameters.values())
        shards: dict[int, Shard] = {}
        for name, tensor in state.items():
            is_wanted = isinstance(tensor, Tensor) and (tensor.requires_grad or not has_frozen)
            if not is_wanted or id(tensor) in shards:
                continue
            values, offsets = tensor.detach(), (0,) * tensor.dim()
            if isinstance(values, DTensor):
                (chunk,) = values.__create_chunk_list__()
                values, offsets = values.to_local(), tuple(chunk.offsets)
            is_parameter = id(tensor) in parameters
            if is_parameter and values.is_floating_point():
                values = values.to(self.dtype)
            if values.numel():
                name = name.replace("_orig_mod.", "")
                shards[id(tensor)] = Shard(name, tuple(tensor.shape), offsets, values, is_parameter)
        return list(shards.values())


def _key(shard: Shard) -> int:
    """Return a number that ranks with the same part have in common."""
    text = repr((shard.name, shard.offsets, tuple(shard.values.shape)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _together(work: Callable[[], T]) -> list[T]:
    """Return what ``work`` returns on each rank, in order; raise an error of one rank on all. Collective."""
    result, error, own = None, None, None
    try:
        result = work()
    except (OSError, ValueError) as caught:
        error = describe_error(caught)
    except Exception as caught:  # no user's error: the others must not go on either
        own = caught
    answer = result, error, None if own is None else repr(own)
    answers = gather_objects(answer) if dist.is_initialized() else [answer]
    if own is not None:
        raise own
    for rank, (_, text, crash) in enumerate(answers):
        if crash is not None:
            raise RuntimeError(f"rank {rank} cannot publish: {crash}")
        if text is not None:
            raise PublishError(f"rank {rank}: {text}" if rank else text)
    return [result for result, *_ in answers]  # type: ignore[misc]
