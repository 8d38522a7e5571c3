"""Two files read what is private to FSDP2, so that a new torch release is checked in one place."""

import ast
import types
from collections.abc import Iterable
from pathlib import Path

import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, _fully_shard
from torch.distributed.tensor import DTensor

import megatron_zpp

ROOT = Path(megatron_zpp.__file__).parent
THE_FILES = [ROOT / "zeropp" / "fsdp" / name for name in ("fsdp_unit.py", "find_units.py")]


def private_names() -> set[str]:
    """FSDP2's files, classes, functions and attributes with an underscore, and its classes that are not exported."""
    names = {"_fully_shard"}
    for file in Path(_fully_shard.__file__).parent.glob("_*.py"):
        names.add(file.stem)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    classes = {name for name in names if name.startswith("FSDP")} - set(torch.distributed.fsdp.__all__)
    return classes | {name for name in names if name.startswith("_")} - set(dir(nn.Module()))


def mentioned(file: Path) -> set[str]:
    """The names and strings of a file, but for what its own objects call theirs."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # getattr(state, "_fsdp_param_group"), type(owner).__name__ == "FSDPParamGroup"
    return names


def test_two_files_read_what_is_private_to_fsdp2():
    private = private_names()
    assert {"FSDPParamGroup", "_get_fsdp_state", "_training_state"} <= set().union(*map(mentioned, THE_FILES)) & private
    others = [file for file in ROOT.rglob("*.py") if file not in THE_FILES]
    found = {str(file.relative_to(ROOT)): mentioned(file) & private for file in others}
    assert {file: names for file, names in found.items() if names} == {}


def names_in(files: Iterable[Path]) -> set[str]:
    """All attributes, functions, classes and fields that files name."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {getattr(node, field, None) for field in ("attr", "name", "id", "arg")}
    return names


def test_what_is_read_of_fsdp2s_objects_exists():
    """mypy cannot follow classes without annotations: each attribute is one of ours, or named in FSDP2."""
    nodes = [node for file in THE_FILES for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant)} & {"wait_for_unshard", "FSDPParamGroup"}
    ours = names_in(other for other in ROOT.rglob("*.py") if other not in THE_FILES)
    ours |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    kinds = (Tensor, DTensor, nn.Module, FSDPModule, str, list, set, types.FrameType)
    known = names_in(Path(_fully_shard.__file__).parent.glob("*.py")).union(*map(dir, kinds))
    assert {"wait_for_unshard", "FSDPParamGroup", "unsharded_accumulated_grad"} <= read & known
    assert read - known - ours == set()
