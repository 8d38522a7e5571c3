"""docs/reference/fsdp2-hooks.md lists what the source does not show: hooks, and methods that are replaced."""

import ast
import re
from collections import Counter
from pathlib import Path

import megatron_zpp
from tests.zeropp.test_fsdp_privates import THE_FILES, mentioned, private_names

PACKAGE = Path(megatron_zpp.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "reference" / "fsdp2-hooks.md").read_text()
HOOK = re.compile(r"register_.*hook|queue_callback")
# Attributes that a step calls on objects of torch's, or of ours: setting one replaces a method.
METHODS = {
    "_all_gather_comm", "_all_reduce_hook", "_init_group", "_pre_forward", "_reduce_scatter_comm", "attention",
    "document_attention", "finalize_backward", "forward", "post_backward", "step", "wait_for_unshard", "zero_grad",
}  # fmt: skip
OTHER_SETATTR = {  # a time, the standard streams, and methods of a class of its own
    *("checkpoint/saver.py", "metrics/lasting.py", "parallel/staged_backend.py")
}


def in_source(file: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if HOOK.fullmatch(name) or name == "setattr":
                found[name] += 1
        elif isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
            for target in targets:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if isinstance(target, ast.Attribute) and target.attr in METHODS and not is_own:
                    found[target.attr] += 1
    return found


def on_page() -> dict[str, Counter[str]]:
    listed: dict[str, Counter[str]] = {}
    for file, what in re.findall(r"^\| `([\w/]+\.py)` \| ([^|]*) \|", PAGE, re.MULTILINE):
        names = ["setattr"] if "setattr" in what else re.findall(r"`(\w+)`", what)
        listed.setdefault(file, Counter()).update(names)
    return listed


def test_the_page_lists_every_hook_and_replaced_method():
    files = {str(file.relative_to(PACKAGE)): in_source(file) for file in PACKAGE.rglob("*.py")}
    assert {file: found for file, found in files.items() if found and file not in OTHER_SETATTR} == on_page()


def test_the_page_names_all_that_is_private_to_fsdp2():
    rows = PAGE.partition("## FSDP2's private names")[2]
    assert {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]*) \|", rows, re.MULTILINE)))} == (
        set().union(*map(mentioned, THE_FILES)) & private_names()
    )
