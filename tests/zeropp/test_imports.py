"""What the files of megatron_zpp.zeropp import: torch alone, and each other without circles."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import megatron_zpp.zeropp

ROOT = Path(megatron_zpp.zeropp.__file__).parent


def imported(file: Path) -> set[str]:
    """What a file imports, anywhere in it, by absolute name: modules, and names in them."""
    package = ("megatron_zpp.zeropp", *file.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [".".join(package[: len(package) - node.level + 1])] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def files() -> dict[str, Path]:
    """Every file by its module's name."""
    modules = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        modules[".".join(("megatron_zpp.zeropp", *parts))] = file
    return modules


def test_zeropp_needs_torch_alone():
    for name, file in files().items():
        outside = {module.split(".")[0] for module in imported(file) if not module.startswith("megatron_zpp.zeropp")}
        assert outside <= {"torch", *sys.stdlib_module_names}, name


def test_no_two_files_import_each_other():
    modules = files()
    graph = {}
    for name, file in modules.items():
        # ``from . import kernels`` imports a file, ``from .config import ZeroPPConfig`` a name in one.
        uses = {used if used in modules else used.rpartition(".")[0] for used in imported(file)}
        graph[name] = uses & modules.keys() - {name}
    assert "megatron_zpp.zeropp.reference" in graph["megatron_zpp.zeropp.wire_format"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
