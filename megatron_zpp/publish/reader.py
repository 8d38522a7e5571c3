"""Follow weights that a run publishes, to the bit."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.moves import apply_moves

from .files import DTYPES, FORMAT, MOVES, PublishError, manifest_path, pack, versions_in


@dataclass
class _Shard:
    """What one rank of the run publishes."""

    places: dict[str, tuple[list[int], list[int]]]  # by name: shape of the whole tensor, and offsets of the part in it
    sizes: dict[str, list[int]]  # of the parts
    format: WireFormat
    wire: Tensor  # the 16-bit parts, in the order of ``places``
    others: dict[str, Tensor]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each part; they share memory with this object."""
        values, start = self.wire.view(self.format.dtype), 0
        for name, size in self.sizes.items():
            if name in self.others:
                yield name, self.others[name]
            else:
                yield name, values[start : (start := start + math.prod(size))].view(size)


class WeightReader:
    """The weights in a folder into which a run publishes, as CPU tensors."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.version: int | None = None  # of the weights at hand; None: there are none yet
        self.step = 0  # the optimizer step after which they were published
        self.about: dict[str, Any] = {}  # what the run says beside its weights
        self._run: str | None = None
        self._shards: dict[int, _Shard] = {}  # by rank

    def update(self) -> bool:
        """Take the newest version; return whether there was a newer one. Raises PublishError or OSError."""
        for is_last_try in (False, False, True):
            try:
                manifests = self._newer()
                for manifest in manifests:
                    self._take(manifest)
                return bool(manifests)
            except FileNotFoundError as error:  # deleted meanwhile: then there is a newer anchor
                if is_last_try:
                    raise PublishError(f"{error.filename} is missing: {_REMEDY}") from error
        raise AssertionError

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every published tensor, whole; each is a copy."""
        parts: dict[str, list[tuple[_Shard, Tensor]]] = {}
        for shard in self._shards.values():
            for name, part in shard.parts():
                parts.setdefault(name, []).append((shard, part))
        for name, of_ranks in parts.items():
            shape = of_ranks[0][0].places[name][0]
            whole = torch.empty(shape, dtype=of_ranks[0][1].dtype)
            for shard, part in of_ranks:
                offsets = shard.places[name][1]
                whole[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))] = part
            yield name, whole

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Write the weights into the parameters and buffers of these names. Raises PublishError if some do not fit."""
        state = model.state_dict(keep_vars=True)
        for name, tensor in self.tensors():
            if name not in state or state[name].shape != tensor.shape:
                here = f"has the shape {list(state[name].shape)}" if name in state else "does not exist"
                raise PublishError(
                    f"{self.folder} holds the weights of another model: {name} {list(tensor.shape)} {here} in this one"
                )
            state[name].copy_(tensor)

    def _newer(self) -> list[dict[str, Any]]:
        """Return the manifests that lead from the weights at hand, or from an anchor, to the newest version."""
        version = max(versions_in(self.folder), default=None)
        newer: list[dict[str, Any]] = []
        while version is not None:
            manifest = self._manifest(version)
            if version == self.version and manifest["run"] == self._run:
                break
            newer.insert(0, manifest)
            version = manifest["base"]
        return newer

    def _manifest(self, version: int) -> dict[str, Any]:
        path = manifest_path(self.folder, version)
        try:
            manifest = json.loads(path.read_bytes())
            if manifest["format"] != FORMAT or manifest["version"] != version:
                raise ValueError(f"it says {manifest['format']!r}, version {manifest['version']!r}")
            if not (manifest["base"] is None or 0 < manifest["base"] < version):
                raise ValueError(f"its base is {manifest['base']!r}")
            for name, entry in manifest["files"].items():
                if Path(name).name != name or not isinstance(entry["bytes"], int):
                    raise ValueError(f"it names {name!r}")
            return {key: manifest[key] for key in ("run", "version", "base", "step", "about", "files")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PublishError(f"{path} is not a manifest of published weights ({error!r}): {_REMEDY}") from error

    def _take(self, manifest: dict[str, Any]) -> None:
        """Move to a version whose base is at hand, or to an anchor."""
        # All files are checked before any weight changes.
        files = {rank: self._read(name, manifest) for rank, name in enumerate(sorted(manifest["files"]))}
        self.version = None  # until all of it is done: else the next update begins with an anchor
        for rank, (name, metadata, tensors) in files.items():
            try:
                if manifest["base"] is None:
                    self._shards[rank] = _anchor(metadata, tensors)
                else:
                    shard = self._shards[rank]
                    apply_moves(shard.format, shard.wire.unsqueeze(0), tensors.pop(MOVES).unsqueeze(0))
                    shard.others = tensors
            except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
                raise PublishError(f"{self.folder / name} does not follow its base ({error!r}): {_REMEDY}") from error
        if manifest["base"] is None:
            self._shards = {rank: self._shards[rank] for rank in files}
            self.about = manifest["about"]
        self.version, self.step, self._run = manifest["version"], manifest["step"], manifest["run"]

    def _read(self, name: str, manifest: Mapping[str, Any]) -> tuple[str, dict[str, str], dict[str, Tensor]]:
        path, entry = self.folder / name, manifest["files"][name]
        content = bytearray(path.read_bytes())
        if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise PublishError(f"{path} is not what was published, its size or SHA-256 differs: {_REMEDY}")
        try:
            metadata, tensors = parse_safetensors(content)
            for key in ("run", "version", "base"):
                if json.loads(metadata[key]) != manifest[key]:
                    raise ValueError(f"{key} is {metadata[key]}, in the manifest {manifest[key]}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PublishError(f"{path} is not a file of published weights ({error!r}): {_REMEDY}") from error
        return name, metadata, tensors


def _anchor(metadata: Mapping[str, str], tensors: dict[str, Tensor]) -> _Shard:
    places = json.loads(metadata["places"])
    for name, tensor in tensors.items():
        shape, offsets = places[name]
        if not all(at >= 0 and at + n <= m for at, n, m in zip(offsets, tensor.shape, shape, strict=True)):
            raise ValueError(f"{name} is not within its shape")
    dtype = DTYPES[metadata["dtype"]]
    others = {name: tensor for name, tensor in tensors.items() if tensor.dtype != dtype}
    sizes = {name: [*tensor.shape] for name, tensor in tensors.items()}
    return _Shard(places, sizes, *pack(tensors.values(), dtype), others)


def parse_safetensors(content: bytearray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file; the tensors share its memory. Raises ValueError."""
    start = 8 + int.from_bytes(content[:8], "little")
    if start > len(content):
        raise ValueError("its header is longer than the file")
    header = json.loads(content[8:start])
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numel = math.prod(shape)
        if end - begin != numel * dtype.itemsize or not 0 <= begin <= end <= len(content) - start:
            raise ValueError(f"{name} is not within the file")
        tensors[name] = torch.empty(shape, dtype=dtype)
        if numel:
            tensors[name] = torch.frombuffer(content, dtype=dtype, count=numel, offset=start + begin).view(shape)
    return metadata, tensors


_REMEDY = "wait for the run's next anchor, or let it publish into an empty folder"
