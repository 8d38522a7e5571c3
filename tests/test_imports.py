"""Which folder may import which: CONTRIBUTING.md's table, kept by reading every import of the package."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "megatron_zpp"
# From the bottom up: a folder may import those in its row, which all stand above it. So there are no circles.
LAYERS = {
    folder: re.findall(r"`(\w+)`", lower)
    for folder, lower in re.findall(
        r"^\| `(\w+)` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE
    )
}
# The same within zeropp/, whose files at the top may import all of it: only these of them are imported from below.
PARTS_OF_ZEROPP = {
    "wire": [],
    "fsdp": ["wire", "config"],
    "gather": ["wire", "fsdp"],
    "reduce": ["wire", "fsdp", "config"],
    "muon": ["wire", "fsdp", "config", "api"],
}
ALONE = {  # what the lower folders may import beside the standard library
    "zeropp": {"torch"},
    "publish": {"torch"},
    "models": {"torch"},
    "islands": {"torch"},
    "settings": set(),
    "optim": {"torch"},
    "parallel": {"torch"},
}


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, by its absolute name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [*file.relative_to(ROOT).parts[: -node.level], *([node.module] if node.module else [])]
            yield from (".".join([*package, alias.name]) for alias in node.names)


def files_of(folder: str) -> list[Path]:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    return files


def test_every_folder_has_a_layer_above_those_that_it_imports() -> None:
    assert len(LAYERS) > 10
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert sorted(folders) == sorted(LAYERS)
    order = list(LAYERS)
    for folder, allowed in LAYERS.items():
        assert all(order.index(lower) < order.index(folder) for lower in allowed)


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_what_its_layer_allows(folder: str) -> None:
    imported = {}
    for file in files_of(folder):
        for module in imports_of(file):
            parts = module.split(".")
            if parts[0] == "megatron_zpp" and parts[1] not in (folder, "__version__", "errors", "fields", "files"):
                imported.setdefault(parts[1], []).append(str(file.relative_to(ROOT)))
    assert imported.keys() <= set(LAYERS[folder]), {k: v for k, v in imported.items() if k not in LAYERS[folder]}
    assert imported.keys() == set(LAYERS[folder]), "the table allows more than is used"


@pytest.mark.parametrize("part", PARTS_OF_ZEROPP)
def test_a_part_of_zeropp_imports_what_stands_above_it_here(part: str) -> None:
    imported = {
        module.split(".")[2]
        for file in files_of(f"zeropp/{part}")
        for module in imports_of(file)
        if module.startswith("megatron_zpp.zeropp.")
    }
    assert imported - {part} == {*PARTS_OF_ZEROPP[part]}


@pytest.mark.parametrize("folder", ALONE)
def test_lower_folders_need_nothing_but_torch(folder: str) -> None:
    for file in files_of(folder):
        tops = {module.partition(".")[0] for module in imports_of(file)}
        assert tops - sys.stdlib_module_names - {"megatron_zpp"} <= ALONE[folder], file


@pytest.mark.parametrize("folder", LAYERS)
def test_no_two_files_import_each_other(folder: str) -> None:
    """Circles of files within a folder, of any length, imports for type checkers included."""
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files_of(folder)}
    graph = {
        name: {
            known
            for module in imports_of(file)
            for known in (module, module.rpartition(".")[0])
            if known in names and known != name
        }
        for name, file in names.items()
    }
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other: {', '.join(graph)}"


def test_tools_for_text_start_without_torch() -> None:
    """Its import takes longer than many of their jobs, and each of their worker processes would pay it."""
    tools = ["data.merge_datasets", "data.preprocess_data", "report", "data.train_tokenizer"]
    imports = "; ".join(f"import megatron_zpp.commands.{tool}" for tool in tools)
    subprocess.run([sys.executable, "-c", f"import sys; {imports}; assert 'torch' not in sys.modules"], check=True)
