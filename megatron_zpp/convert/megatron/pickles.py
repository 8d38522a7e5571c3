"""Read what torch.save and torch.distributed.checkpoint wrote, without running any of it.

A pickle names classes and functions, and unpickling calls them. Here a name either makes only plain values (a tensor, a
size), or is in ``names.toml``, of what Megatron and DeepSpeed save, and becomes a ``StandIn``. Any other name refuses
the file.
"""

import argparse
import pickle
import re
import tomllib
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_zpp.checkpoint import CheckpointError


class StandIn:
    """Replaces an object of another class: holds the arguments that made it, and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def _full_names(table: Mapping[str, str]) -> list[str]:
    return [f"{module}.{name}" for module, names in table.items() for name in names.split()]


def _member(kind: Any, name: Any) -> StandIn:
    """Stand in for getattr, as which Python before 3.11.4 saves a member of an enumeration: getattr(Kind, "name")."""
    if kind is not StandIn:
        raise _RefusedError("builtins.getattr")
    return StandIn(name)


_SAFE: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    (_member, "builtins.getattr"),
    *((StandIn, name) for name in _full_names(NAMES["pickled"])),
]
_CLASSES: dict[str, Any] = {
    **dict.fromkeys(_full_names(NAMES["in_index"]), StandIn),
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
}


def load_file(path: Path) -> Any:
    """Read a file of torch.save; tensors stay in it until they are used. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or not a regular file")
    return load(path, path)


def load(source: Path | BinaryIO, path: Path) -> Any:
    """Read what torch.save wrote. path: for messages. Raises CheckpointError."""
    of_others = torch.serialization.get_safe_globals()  # names that other libraries trust are not trusted here
    torch.serialization.clear_safe_globals()
    try:
        mmap = isinstance(source, Path) and zipfile.is_zipfile(source)  # which raises an error of its own
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from None
    except Exception as error:  # many kinds, since the file may hold anything
        raise CheckpointError(f"{path} is damaged ({_first_line(error)})") from error
    finally:
        torch.serialization.add_safe_globals(of_others)


def load_metadata(path: Path) -> Any:
    """Read the index of torch.distributed.checkpoint, its objects as ``StandIn``s. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or not a regular file")
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except _RefusedError as refused:
        raise _refusal(path, f"GLOBAL {refused}") from None
    except Exception as error:
        raise CheckpointError(f"{path} is damaged ({_first_line(error)})") from error


class _RefusedError(Exception):
    """A name that is not in the list."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in _CLASSES:
            raise _RefusedError(full)
        return _CLASSES[full]


def _refusal(path: Path, reason: str) -> CheckpointError:
    name = re.search(r"GLOBAL ([\w.]+)", reason)
    if name is None:
        return CheckpointError(f"{path} is damaged, or is not what torch.save writes ({_first_line(reason)})")
    return CheckpointError(
        f"{path} is not read: unpickling it would call {name[1]}, which Megatron and DeepSpeed do not save"
    )


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
