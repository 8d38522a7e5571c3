"""Follow weights that a run publishes, to the bit."""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.errors import describe_error
from megatron_zpp.files import LARGEST_TEXT, open_regular, without_duplicates
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.moves import apply_moves

from .files import DTYPES, FORMAT, MOVES, PublishError, manifest_path, pack, shards_name, versions_in

Places = dict[str, tuple[list[int], list[int]]]  # by name: shape of the whole tensor, and offsets of a part in it


@dataclass
class _Shards:
    """The tensors that one rank of the run publishes."""

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
    """The weights in a folder into which a run publishes, as CPU tensors. It believes nothing that does not fit."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.version: int | None = None  # version of the loaded weights; None before the first
        self.step = 0  # the optimizer step after which they were published
        self.about: dict[str, Any] = {}  # the run's metadata
        self._run: str | None = None
        self._ranks: dict[str, _Shards] = {}  # by the end of their files' names

    def update(self, timeout_seconds: float = 60.0) -> bool:
        """Take the newest version; return whether there was a newer one. Raises PublishError.

        timeout_seconds: how long to begin again where the run deletes versions before they are read.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            manifests: list[dict[str, Any]] = []
            try:
                self._find_newer(manifests)
                for manifest in manifests:
                    self._take(manifest)
                return bool(manifests)
            except FileNotFoundError as error:
                # Deleted meanwhile, since there is a newer anchor; or else it is missing.
                if _newest(self.folder) == (manifests[-1]["version"] if manifests else None):
                    raise PublishError(f"{error.filename} is missing: {_REMEDY}") from error
                if time.monotonic() > deadline:
                    slow = f"the run deleted versions in {self.folder} before they were read, for {timeout_seconds:g} s"
                    raise PublishError(f"{slow}: let it publish fewer, or anchors more rarely") from error
                time.sleep(0.01)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every published tensor, whole, as copies. Raises PublishError if there are none."""
        if self.version is None:
            raise PublishError(f"there are no weights of {self.folder} yet: call update() until it returns True")
        yield from _assembled(self._ranks.values())

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
        version = _newest(self.folder)
        while version is not None:
            path = manifest_path(self.folder, version)
            with _explained(path):
                manifest = json.loads(_content(path), object_pairs_hook=without_duplicates)
                _check_manifest(manifest, version)
                if manifest["run"] == self._run and self.version is not None and version <= self.version:
                    return
                newer.insert(0, manifest)
                version = manifest["base"]

    def _take(self, manifest: Mapping[str, Any]) -> None:
        """Move to a version whose base is at hand, or to an anchor."""
        with _explained(manifest_path(self.folder, manifest["version"])):
            # All files are checked before any weight changes.
            files = {
                name.partition(".")[2]: self._read(self.folder / name, entry, manifest)
                for name, entry in sorted(manifest["files"].items())
            }
            if manifest["base"] is None:
                ranks = {rank: _anchored(*file) for rank, file in files.items()}
                for _ in _assembled(ranks.values()):
                    pass  # each fits
                self._ranks, self.about = ranks, manifest["about"]
            else:
                moves = {rank: tensors.pop(MOVES) for rank, (_, tensors) in files.items()}
                others = {rank: tensors for rank, (_, tensors) in files.items()}
                if _kinds(others) != _kinds({rank: shards.others for rank, shards in self._ranks.items()}):
                    raise ValueError("its tensors differ from its base's")
                self.version = None  # until all have moved: else the next update begins with an anchor
                for rank, shards in self._ranks.items():
                    apply_moves(shards.format, shards.wire.unsqueeze(0), moves[rank].unsqueeze(0))
                    shards.others = others[rank]
            self.version, self.step, self._run = manifest["version"], manifest["step"], manifest["run"]

    def _read(
        self, path: Path, entry: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, Tensor]]:
        with _explained(path):
            content = _content(path, entry["bytes"])
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise PublishError(f"{path} is not what was published, its SHA-256 differs: {_REMEDY}")
            metadata, tensors = parse_safetensors(content)
            for key in ("run", "version", "base"):
                if json.loads(metadata[key]) != manifest[key]:
                    raise ValueError(f"{key} is {metadata[key]}, but {manifest[key]} in the manifest")
        return metadata, tensors


def _newest(folder: Path) -> int | None:
    with _explained(folder):
        return max(versions_in(folder), default=None)


def _content(path: Path, nbytes: int | None = None) -> bytearray:
    """Read a regular file. Raises PublishError unless it has ``nbytes``; None: as many as a manifest may have."""
    with open_regular(path) as file:
        content = bytearray(min(os.fstat(file.fileno()).st_size, LARGEST_TEXT if nbytes is None else nbytes + 1))
        if file.readinto(content) != len(content) or nbytes not in (None, len(content)):  # type: ignore[attr-defined]
            raise PublishError(f"{path} is not what was published, its size differs: {_REMEDY}")
        return content


def _check_manifest(manifest: Any, version: int) -> None:
    """Raise an error unless each value has its type, and files are this version's, beside the manifest."""
    head, files = [manifest[key] for key in ("format", "version", "run", "step", "base")], manifest["files"]
    base, types = head[-1], (type(manifest["run"]), type(manifest["step"]), type(manifest["about"]))
    follows = base is None or (type(base) is int and 0 < base < version)
    if head[:2] != [FORMAT, version] or types != (str, int, dict) or not follows or not files:
        raise ValueError(f"format, version, run, step and base are {head}, with {len(files)} files")
    for name in files:
        rank = name.split(".")[1].removeprefix("rank")
        if name != shards_name(version, int(rank)):
            raise ValueError(f"{name!r} is no file of this version")


def _anchored(metadata: Mapping[str, str], tensors: dict[str, Tensor]) -> _Shards:
    """Return one rank's shards in an anchor."""
    dtype, places = DTYPES[metadata["dtype"]], json.loads(metadata["places"])
    if dtype.itemsize != 2 or places.keys() != tensors.keys() or MOVES in tensors:
        raise ValueError(f"it has {len(tensors)} tensors, and places of {len(places)} in {dtype}")
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    others = {name: tensor for name, tensor in tensors.items() if tensor.dtype != dtype}
    return _Shards(places, sizes, *pack(tensors.values(), dtype), others)


def _assembled(ranks: Iterable[_Shards]) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor with its name. Raises an error unless its parts cover it, each element once."""
    parts: dict[str, list[tuple[list[int], list[int], Tensor]]] = {}
    for shards in ranks:
        for name, part in shards.parts():
            parts.setdefault(name, []).append((*shards.places[name], part))
    for name, of_ranks in parts.items():
        shape, _, first = of_ranks[0]
        if sum(part.numel() for *_, part in of_ranks) != math.prod(shape):  # before memory is taken for it
            raise ValueError(f"the parts of {name} do not make up {shape}")
        whole, is_covered = torch.empty(shape, dtype=first.dtype), torch.zeros(shape, dtype=torch.bool)
        for shape_there, offsets, part in of_ranks:
            ends = [at + size for at, size in zip(offsets, part.shape, strict=True)]
            is_inside = all(at >= 0 and end <= size for at, end, size in zip(offsets, ends, shape, strict=True))
            if shape_there != shape or part.dtype != first.dtype or not is_inside:
                raise ValueError(f"{name} is {shape_there} with a part {[*part.shape]} in {part.dtype} at {offsets}")
            place = tuple(map(slice, offsets, ends))
            whole[place], is_covered[place] = part, True
        if not is_covered.all():
            raise ValueError(f"parts of {name} overlap")
        yield name, whole


def _kinds(ranks: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    return {rank: {name: (x.shape, x.dtype) for name, x in tensors.items()} for rank, tensors in ranks.items()}


def parse_safetensors(content: bytearray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file; the tensors share its memory.

    Raises an error of any kind unless the tensors lie one after the other and fill the file.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start], object_pairs_hook=without_duplicates)
    metadata, tensors, at = header.pop("__metadata__"), {}, start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if (numel := math.prod(shape)) * dtype.itemsize != end - begin or start + begin != at:
            raise ValueError(f"{name} has {end - begin} bytes at {begin}")
        at = start + end
        tensors[name] = torch.empty(shape, dtype=dtype)
        if numel:
            tensors[name] = torch.frombuffer(content, dtype=dtype, count=numel, offset=start + begin).view(shape)
    if at != len(content):
        raise ValueError(f"it has {len(content)} bytes, and its header says {at}")
    return metadata, tensors


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with the content of a file, which anybody may have written, into a PublishError."""
    try:
        yield
    except (PublishError, FileNotFoundError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {describe_error(error)[:200]}"
        raise PublishError(f"{path} is not of published weights ({why}): {_REMEDY}") from error


_REMEDY = "wait for the run's next anchor, or let it publish into an empty folder"
