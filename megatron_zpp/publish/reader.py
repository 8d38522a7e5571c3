"""Follow weights that a run publishes, to the bit."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.moves import apply_moves

from .files import DTYPES, FORMAT, MOVES, PublishError, manifest_path, pack, versions_in

Places = dict[str, tuple[list[int], list[int]]]  # by name: shape of the whole tensor, and offsets of a part in it


@dataclass
class _Shards:
    """What one rank of the run publishes."""

    places: Places
    sizes: dict[str, torch.Size]
    format: WireFormat
    wire: Tensor  # the 16-bit parts, in the order of ``sizes``
    others: dict[str, Tensor]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each part; they share memory with this object."""
        values, start = self.wire.view(self.format.dtype), 0
        for name, size in self.sizes.items():
            if name not in self.others:
                start, begin = start + size.numel(), start
            yield name, self.others[name] if name in self.others else values[begin:start].view(size)


class WeightReader:
    """The weights in a folder into which a run publishes, as CPU tensors."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.version: int | None = None  # of the weights at hand; None: there are none yet
        self.step = 0  # the optimizer step after which they were published
        self.about: dict[str, Any] = {}  # what the run says beside its weights
        self._run: str | None = None
        self._ranks: dict[int, _Shards] = {}

    def update(self) -> bool:
        """Take the newest version; return whether there was a newer one. Raises PublishError or OSError."""
        while True:
            manifests: list[dict[str, Any]] = []
            try:
                self._find_newer(manifests)
                for manifest in manifests:
                    self._take(manifest)
                return bool(manifests)
            except FileNotFoundError as error:
                # Deleted meanwhile, since there is a newer anchor; or else it is missing.
                if max(versions_in(self.folder), default=None) == (manifests[-1]["version"] if manifests else None):
                    raise PublishError(f"{error.filename} is missing: {_REMEDY}") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every published tensor, whole; each is a copy."""
        parts: dict[str, list[tuple[list[int], Tensor]]] = {}
        shapes: dict[str, list[int]] = {}
        for shards in self._ranks.values():
            for name, part in shards.parts():
                shapes[name], offsets = shards.places[name]
                parts.setdefault(name, []).append((offsets, part))
        for name, of_ranks in parts.items():
            whole = torch.empty(shapes[name], dtype=of_ranks[0][1].dtype)
            for offsets, part in of_ranks:
                whole[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))] = part
            yield name, whole

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Write the weights into the parameters and buffers of these names. Raises PublishError if one does not fit."""
        state = model.state_dict(keep_vars=True)
        for name, tensor in self.tensors():
            here = [*state[name].shape] if name in state else "missing"
            if here != [*tensor.shape]:
                what = f"{name}, {[*tensor.shape]} there, is {here} here"
                raise PublishError(f"{self.folder} holds the weights of another model: {what}")
            state[name].copy_(tensor)

    def _find_newer(self, newer: list[dict[str, Any]]) -> None:
        """Find the manifests that lead from the weights at hand, or from an anchor, to the newest version."""
        version = max(versions_in(self.folder), default=None)
        while version is not None:
            path = manifest_path(self.folder, version)
            with _explained(path):
                manifest = json.loads(path.read_bytes())
                if (manifest["format"], manifest["version"]) != (FORMAT, version):
                    raise ValueError(f"format {manifest['format']!r}, version {manifest['version']!r}")
                if version == self.version and manifest["run"] == self._run:
                    return
                newer.insert(0, manifest)
                version = manifest["base"]
                if version is not None and not 0 < version < manifest["version"]:
                    raise ValueError(f"base {version!r}")

    def _take(self, manifest: Mapping[str, Any]) -> None:
        """Move to a version whose base is at hand, or to an anchor."""
        with _explained(manifest_path(self.folder, manifest["version"])):
            # All files are checked before any weight changes.
            files = [self._read(name, entry, manifest) for name, entry in sorted(manifest["files"].items())]
            self.version = None  # until it is done: else the next update begins with an anchor
            for rank, (metadata, tensors) in enumerate(files):
                if manifest["base"] is None:
                    dtype, places = DTYPES[metadata["dtype"]], json.loads(metadata["places"])
                    sizes = {name: tensor.shape for name, tensor in tensors.items()}
                    others = {name: tensor for name, tensor in tensors.items() if tensor.dtype != dtype}
                    self._ranks[rank] = _Shards(places, sizes, *pack(tensors.values(), dtype), others)
                else:
                    shards = self._ranks[rank]
                    apply_moves(shards.format, shards.wire.unsqueeze(0), tensors.pop(MOVES).unsqueeze(0))
                    shards.others = tensors
            if manifest["base"] is None:
                self._ranks = {rank: self._ranks[rank] for rank in range(len(files))}
                self.about = manifest["about"]
            self.version, self.step, self._run = manifest["version"], manifest["step"], manifest["run"]

    def _read(
        self, name: str, entry: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, Tensor]]:
        path = self.folder / name
        content = bytearray(path.read_bytes())
        if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise PublishError(f"{path} is not what was published, its size or SHA-256 differs: {_REMEDY}")
        with _explained(path):
            metadata, tensors = parse_safetensors(content)
            for key in ("run", "version", "base"):
                if json.loads(metadata[key]) != manifest[key]:
                    raise ValueError(f"{key} is {metadata[key]}, but {manifest[key]} in the manifest")
        return metadata, tensors


def parse_safetensors(content: bytearray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file; the tensors share its memory."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if (numel := math.prod(shape)) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes")
        tensors[name] = torch.empty(shape, dtype=dtype)
        if numel:
            tensors[name] = torch.frombuffer(content, dtype=dtype, count=numel, offset=start + begin).view(shape)
    return metadata, tensors


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the content of a file into a PublishError."""
    try:
        yield
    except PublishError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise PublishError(f"{path} is not of published weights ({error!r}): {_REMEDY}") from error


_REMEDY = "wait for the run's next anchor, or let it publish into an empty folder"
