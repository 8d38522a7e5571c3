"""Publish the weights of a model that trains: each rank writes what moved in its shards, and nothing is gathered."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_zpp.files import open_lock
from megatron_zpp.zeropp.fsdp.topology import gather_objects
from megatron_zpp.zeropp.wire.moves import encode_moves

from .files import FORMAT, MOVES, NAMES, PublishError, manifest_path, pack, shard_name, versions_in, write_safetensors

T = TypeVar("T")


class Shard(NamedTuple):
    """This rank's part of a tensor, as published."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of this part in it
    values: Tensor

    @property
    def key(self) -> int:
        """A number that ranks with the same part have in common."""
        text = repr((self.name, self.offsets, tuple(self.values.shape)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


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

        anchor_interval: versions from one anchor, which has all weights, to the next; older ones than the anchor before
        the latest are deleted. resume: go on in a folder that has versions; the next one is an anchor.
        """
        if dtype not in (torch.bfloat16, torch.float16):
            raise PublishError(f"weights are published in torch.bfloat16 or torch.float16, not {dtype}")
        if anchor_interval < 1:
            raise PublishError(f"anchor_interval must be at least 1, is {anchor_interval}")
        self.model, self.folder, self.dtype = model, Path(folder), dtype
        self.anchor_interval = anchor_interval
        self.about: dict[str, Any] = {}  # what readers find beside the weights of an anchor; of rank 0, JSON
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        opened = _together(lambda: (self._open(resume), uuid.uuid4().hex) if self.rank == 0 else None)[0]
        assert opened is not None
        self.version, self._run = opened  # the last one in the folder, and a name for this run
        self._anchor = 0  # the latest of this run
        self._wire: Tensor | None = None  # this rank's values as in ``version``; None: that is of another run
        held = _together(lambda: [shard.key for shard in self._held()])
        # Of equal parts, which replicas have, the first rank publishes its own.
        self._keys = set(held[self.rank]).difference(*held[: self.rank])

    def _open(self, resume: bool) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self.folder / "lock")
        try:
            # Belongs to this process: the system releases it when the process ends.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise PublishError(
                f"another run publishes into {self.folder}: give this one another folder, or end that run"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            print(f"note: {self.folder} knows no locks ({error.strerror}): let no other run publish there", flush=True)
        last = max(versions_in(self.folder), default=0)
        if last and not resume:
            raise PublishError(
                f"{self.folder} holds the weights of another run, up to version {last}: give an empty folder, or go on "
                "with that run"
            )
        return last

    def publish(self, step: int) -> int:
        """Publish the weights as they are after optimizer step ``step``; return their version.

        Raises PublishError on all ranks if some rank cannot write; readers then still see the version before.
        """
        version = self.version + 1
        base = None if self._wire is None or version - self._anchor >= self.anchor_interval else self.version
        old, self._wire = self._wire, None  # so that an anchor follows a version that failed
        about: dict[str, Any] = {"run": self._run, "version": version, "base": base}
        wire, entries = None, {}

        def write() -> tuple[str, dict[str, Any]] | None:
            nonlocal wire
            shards = [shard for shard in self._held() if shard.key in self._keys]
            format, wire = pack((shard.values for shard in shards), self.dtype)
            metadata = {name: json.dumps(value) for name, value in about.items()}
            if base is None:
                tensors = {shard.name: shard.values for shard in shards}
                places = {shard.name: [shard.shape, shard.offsets] for shard in shards}
                metadata |= {"dtype": NAMES[self.dtype], "places": json.dumps(places)}
            else:
                assert old is not None
                if len(old) != len(wire):
                    raise PublishError("parameters were added, frozen or sharded again: make another Publisher")
                tensors = {shard.name: shard.values for shard in shards if shard.values.dtype != self.dtype}
                tensors[MOVES] = encode_moves(format, old, wire)
            name = shard_name(version, self.rank)
            return (name, write_safetensors(self.folder / name, tensors, metadata)) if shards else None

        entries = dict(filter(None, _together(write)))
        manifest = {"format": FORMAT, **about, "step": step, "about": {} if base else self.about, "files": entries}
        _together(lambda: self._commit(manifest) if self.rank == 0 else None)
        self.version, self._wire = version, wire
        if base is None:
            self._anchor = version
        return version

    def _commit(self, manifest: dict[str, Any]) -> None:
        path = manifest_path(self.folder, manifest["version"])
        incomplete = path.with_suffix(".incomplete")
        incomplete.write_text(json.dumps(manifest))
        os.replace(incomplete, path)
        if manifest["base"] is None:  # readers of the latest anchor may still be at it: the one before it goes
            for path in sorted(self.folder.glob("v????????.*")):  # manifests first
                if path.name[1:9].isdigit() and int(path.name[1:9]) < self._anchor:
                    path.unlink(missing_ok=True)

    def _held(self) -> Iterator[Shard]:
        """Yield this rank's parts of what is published, each once, replicas of other ranks among them."""
        state = self.model.state_dict(keep_vars=True)  # FSDP2 shards what passes have left gathered
        parameters = [tensor for tensor in state.values() if isinstance(tensor, nn.Parameter)]
        has_frozen = not all(parameter.requires_grad for parameter in parameters)
        seen = set()
        for name, tensor in state.items():
            is_parameter = isinstance(tensor, nn.Parameter)
            is_wanted = isinstance(tensor, Tensor) and (tensor.requires_grad if is_parameter else not has_frozen)
            if not is_wanted or id(tensor) in seen:  # tied weights have several names
                continue
            seen.add(id(tensor))
            shape, values = tuple(tensor.shape), tensor.detach()
            offsets = (0,) * len(shape)
            if isinstance(values, DTensor):
                (chunk,) = values.__create_chunk_list__()
                offsets, values = tuple(chunk.offsets), values.to_local()
            if is_parameter and values.is_floating_point():
                values = values.to(self.dtype)
            if values.numel():
                yield Shard(name.replace("_orig_mod.", ""), shape, offsets, values)


def _together(work: Callable[[], T]) -> list[T]:
    """Return what ``work`` returns on each rank, in order; raise a user's error of one rank on all. Collective."""
    result, error = None, None
    try:
        result = work()
    except (OSError, ValueError) as caught:
        error = str(caught)
    answers = gather_objects((result, error)) if dist.is_initialized() else [(result, error)]
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise PublishError(f"rank {rank}: {text}" if len(answers) > 1 else text)
    return [result for result, _ in answers]  # type: ignore[misc]
