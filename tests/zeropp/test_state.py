"""A reader finds all that a step changes: six classes, named in CONTRIBUTING.md, whose methods all have other names."""

import ast
import re
from collections import Counter
from pathlib import Path

import megatron_zpp

ROOT = Path(megatron_zpp.__file__).parent
STARTS = ("__init__", "__post_init__")
FILLS = {"append", "clear", "extend", "setdefault", "update"}
NOT_OF_A_STEP = {"Muon", "WireLayout"}  # an optimizer, and a format that keeps its table on each device


def written(node: ast.AST) -> set[str]:
    """The attributes of ``self`` that code sets or fills."""
    targets: list[ast.AST] = []
    for each in ast.walk(node):
        if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets += each.targets if isinstance(each, ast.Assign) else [each.target]
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in FILLS:
            targets.append(each.func.value)
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    bases = [part.value if isinstance(part, ast.Subscript) else part for part in parts]
    return {base.attr for base in bases if isinstance(base, ast.Attribute) and ast.unparse(base.value) == "self"}


def classes() -> dict[str, ast.ClassDef]:
    nodes = [node for file in (ROOT / "zeropp").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def test_what_changes_in_a_step_is_six_classes_that_the_table_names():
    rows = (ROOT.parent / "CONTRIBUTING.md").read_text().partition("| owner, and how many |")[2].partition("\n\n")[0]
    named = [
        name for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    changing = {
        name
        for name, node in classes().items()
        if any(written(method) for method in methods(node) if method.name not in STARTS)
    }
    assert changing - NOT_OF_A_STEP == {*named} and len(named) == 6
    public = [method.name for name in named for method in methods(classes()[name]) if method.name[0] != "_"]
    assert [name for name, times in Counter(public).items() if times > 1] == []


def test_no_class_holds_more_than_a_reader_can():
    for name, node in classes().items():
        fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
        is_settings = name.endswith("Config")
        assert is_settings or len(fields | written(node)) <= 15, name
        assert is_settings or node.end_lineno - node.lineno < 300, name
