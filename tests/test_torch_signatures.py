"""What the package calls of torch exists in the installed torch, with those arguments, also where only a GPU runs it.

``make test`` asks the newest torch that pyproject.toml allows, ``make test-lower-bound`` the oldest. Nothing is called:
the package's syntax is compared with signatures of Python functions and of torch's stubs.

A name that a file looks for itself (``hasattr(dist, "all_gather_single")``), and an argument that it looks for
(``"enable_gqa" in inspect.signature(varlen_attn).parameters``), may be missing. Methods of tensors and modules are not
seen, but for what is private to FSDP2.
"""

import ast
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, _fully_shard
from torch.distributed.tensor import DTensor

import megatron_zpp
from tests.zeropp.test_fsdp_privates import THE_FILES

ROOT = Path(megatron_zpp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Functions in C++ without a stub that lists their arguments, and Python functions that take any.
NOT_CHECKED = {
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.distributed.tensor.Replicate",
    "torch.special.entr",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
}
OWN_OPERATORS = "torch.ops.megatron_zpp."


# What a file asks of torch


@dataclass(frozen=True)
class Use:
    """One name of torch in a file; with ``call`` or ``keywords`` also the arguments that it is given."""

    name: str  # "torch.distributed.new_group"
    line: int
    call: ast.Call | None = None
    keywords: frozenset[str] = frozenset()  # all that may be given, as by **options


def aliases_of(tree: ast.Module) -> dict[str, str]:
    """The names under which a file has torch's modules, classes and functions."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "torch":
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def uses_of(tree: ast.Module) -> Iterator[Use]:
    """Every name of torch, and every call."""
    aliases = aliases_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Use(a.name, node.lineno) for a in node.names if a.name.partition(".")[0] == "torch")
    for name in aliases.values():
        yield Use(name, 1)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := dotted(node, aliases)) is not None:
            yield Use(name, node.lineno)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    scopes: dict[ast.Call, ast.AST] = {}
    for scope in (tree, *functions):  # a function comes before those in it
        scopes |= {node: scope for node in ast.walk(scope) if isinstance(node, ast.Call)}
    for call, scope in scopes.items():
        if (name := dotted(call.func, aliases)) is not None:
            yield Use(name, call.lineno, call, keywords_of(call, scope))
        elif getattr(call.func, "id", None) == "partial" and (name := dotted(call.args[0], aliases)) is not None:
            yield Use(name, call.lineno, None, keywords_of(call, scope))


def keywords_of(call: ast.Call, scope: ast.AST) -> frozenset[str]:
    """The keywords that a call gives, with all that the function puts into the dicts that it passes with ``**``."""
    given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    passed = {k.value.id for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)}
    for node in ast.walk(scope):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in passed and getattr(node, "value", None) is not None:
                keys = [key for each in ast.walk(node.value) if isinstance(each, ast.Dict) for key in each.keys]
                given |= {key.value for key in keys if isinstance(key, ast.Constant)}
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in passed:
                given |= {target.slice.value} if isinstance(target.slice, ast.Constant) else set()
    return frozenset(given)


def looked_for(tree: ast.Module) -> set[str]:
    """Names and arguments that a file looks for before it uses them."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", None) in ("hasattr", "getattr")
            and len(node.args) > 1
        ):
            found |= {each.value for each in ast.walk(node.args[1]) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and "signature" in ast.dump(node):
            found.add(node.left.value)
    return found


# What torch has


def resolve(name: str) -> Any:
    """The object of a dotted name. Raises AttributeError. Of an instance that is not there yet: None."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    path = first
    for part in rest:
        path += f".{part}"
        if found is None:
            return None
        if hasattr(found, part) or not isinstance(found, types.ModuleType):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise AttributeError(path) from error
    return found


@functools.cache
def stubs() -> dict[str, list[ast.arguments]]:
    """Arguments of functions and classes in torch's stubs of what is in C++, by the last two parts of their names."""
    found: dict[str, list[ast.arguments]] = {}

    def add(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(f"{owner}.{node.name}", [])
                add(node.body, node.name)
                found[f"{owner}.{node.name}"] += found.get(f"{node.name}.__init__", [])
            elif isinstance(node, ast.FunctionDef):
                found.setdefault(f"{owner}.{node.name}", []).append(node.args)

    for file in (Path(torch.__file__).parent / "_C").rglob("*.pyi"):
        add(ast.parse(file.read_text()).body, "")
    return found


def arguments_in_stubs(name: str) -> list[ast.arguments] | None:
    owner, last = name.split(".")[-2:]
    return stubs().get(f"{owner}.{last}", stubs().get(f".{last}", stubs().get(f"_VariableFunctions.{last}")))


def accepts(arguments: ast.arguments, use: Use) -> bool:
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    positional = [*arguments.posonlyargs, *arguments.args]
    count = positional_count(use.call)
    fits = arguments.vararg is not None or count is None or count <= len(positional)
    return fits and (arguments.kwarg is not None or use.keywords <= {*named})


def positional_count(call: ast.Call | None) -> int | None:
    """How many arguments a call gives by position; None: that is not in its syntax."""
    count = 0
    for argument in call.args if call is not None else ():
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
            count += len(argument.value.elts)
        elif isinstance(argument, ast.Starred):
            return None
        else:
            count += 1
    return count


def problems_of(source: str) -> tuple[list[str], set[str]]:
    """Return names that the installed torch lacks for a file, and calls that could not be checked."""
    tree = ast.parse(source)
    exempt, problems, unchecked = looked_for(tree), [], set[str]()
    for use in uses_of(tree):
        if use.name.startswith(OWN_OPERATORS):
            continue
        try:
            found = resolve(use.name)
        except AttributeError:
            if use.name.rpartition(".")[2] in exempt:
                continue
            found = arguments_in_stubs(use.name)  # what this build leaves out
            if found is None:
                problems.append(f"line {use.line}: {use.name} does not exist")
                continue
        if use.call is None and not use.keywords:
            continue
        use = Use(use.name, use.line, use.call, use.keywords - exempt)
        try:
            parameters = inspect.signature(found).parameters.values()
            fits = _fits(list(parameters), use)
        except (TypeError, ValueError):
            stub = arguments_in_stubs(use.name)
            if not stub:
                unchecked.add(use.name)
                continue
            fits = any(accepts(arguments, use) for arguments in stub)
        if not fits:
            given = [*["*"] * (positional_count(use.call) or 0), *sorted(use.keywords)]
            problems.append(f"line {use.line}: {use.name} does not take ({', '.join(given)})")
    return problems, unchecked


def _fits(parameters: list[inspect.Parameter], use: Use) -> bool:
    kinds = {parameter.kind for parameter in parameters}
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    count = positional_count(use.call)
    fits = inspect.Parameter.VAR_POSITIONAL in kinds or count is None or count <= len(positional)
    return fits and (inspect.Parameter.VAR_KEYWORD in kinds or use.keywords <= named)


def test_every_function_of_torch_that_the_package_calls_exists_with_those_arguments():
    problems, unchecked = {}, set()
    for file in FILES:
        problems[str(file.relative_to(ROOT))], not_checked = problems_of(file.read_text())
        unchecked |= not_checked
    assert {file: found for file, found in problems.items() if found} == {}
    assert unchecked <= NOT_CHECKED, "not checked"


def names_in(files: Iterator[Path]) -> set[str]:
    """All attributes, functions, classes and fields that files name."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {getattr(node, field, None) for field in ("attr", "name", "id", "arg")}
    return names


def test_what_is_read_of_fsdp2s_objects_exists():
    """Their classes have no annotations that could be followed: each attribute is one of ours, or named in FSDP2."""
    nodes = [node for file in THE_FILES for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant)} & {"wait_for_unshard", "FSDPParamGroup"}
    ours = names_in(other for other in FILES if other not in THE_FILES)
    ours |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    kinds = (Tensor, DTensor, nn.Module, FSDPModule, str, list, set, types.FrameType)
    known = names_in(Path(_fully_shard.__file__).parent.glob("*.py")).union(*map(dir, kinds))
    assert {"wait_for_unshard", "FSDPParamGroup", "unsharded_accumulated_grad"} <= read & known
    assert read - known - ours == set()


# What the test above would see


def test_what_is_missing_is_found():
    source = """
import torch
import torch.distributed as dist
from torch.nn.attention import varlen
from torch.nowhere import something
import functools

def calls(q, options):
    options = {"scale": 1.0}
    options["no_such_argument"] = True
    varlen.varlen_attn(*(q, q, q, q, q, 1, 1), **options)
    dist.new_group([0], None, pg_options=None, no_such_option=1)
    torch.cat([q], axis_of_no_one=0)
    functools.partial(torch.empty, 3)
    torch.get_device_module("cuda").no_such_thing
    dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.ProcessGroupNCCL.Options(is_low_priority_stream=True)
    dist.no_such_function()
    dist.all_reduce(q, q, q, q, q)
    if hasattr(dist, "may_be_missing"):
        dist.may_be_missing()
"""
    problems, unchecked = problems_of(source)
    assert unchecked == set()
    assert sorted(problem.partition(": ")[2] for problem in problems) == [
        "torch.cat does not take (*, axis_of_no_one)",
        "torch.distributed.ProcessGroupNCCL.Options does not take (is_low_priority_stream)",
        "torch.distributed.all_reduce does not take (*, *, *, *, *)",
        "torch.distributed.new_group does not take (*, *, no_such_option, pg_options)",
        "torch.distributed.no_such_function does not exist",
        "torch.distributed.no_such_function does not exist",  # as a name, and as a call
        "torch.nn.attention.varlen.varlen_attn does not take (*, *, *, *, *, *, *, no_such_argument, scale)",
        "torch.nowhere.something does not exist",
    ]
