"""Every small mistake that a file can be given, as an edit of its text. Part of benchmarks/mutants.py.

An edit replaces one piece of the text, so comments and format stay. Left alone: strings, what is printed, logged or
raised, ``__repr__``, annotations and decorators.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWAPPED: dict[type[ast.AST], Any] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
    ast.Mod: ast.FloorDiv,
}
MESSAGES = {"print", "warn", "warning", "info", "debug", "error", "exit"}  # calls whose arguments only tell somebody
SKIPPED = {"annotation", "returns", "decorator_list", "msg"}


@dataclass(frozen=True)
class Mutant:
    """A file's text but for the bytes from ``start`` to ``end``, which are ``text``."""

    file: str  # relative to the root
    function: str | None  # "Class.method" whose tests judge it; None: an import executes it
    line: int
    operator: str
    before: str  # the changed lines, on one
    after: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def key(row: dict[str, Any]) -> str:
    """Identify a mutant, or its row of results, without its line's number, which may change."""
    return f"{row['file']}: {row['operator']}: {row['before']} -> {row['after']}"


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """All mutants of a file, in the order of their lines."""
    source, line_starts = file.read_bytes(), [0]
    made: dict[str, Mutant] = {}
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for function, operator, node, replacement in _changes(ast.parse(source)):
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(replacement)
        first, last = line_starts[node.lineno - 1], line_starts[node.end_lineno]
        changed = source[first:start] + text.encode() + source[end:last]
        before, after = (" ".join(lines.decode().split()) for lines in (source[first:last], changed))
        name = str(file.relative_to(root))
        mutant = Mutant(name, function, node.lineno, operator, before, after, start, end, text)
        made.setdefault(key(vars(mutant)), mutant)
    return sorted(made.values(), key=lambda mutant: mutant.line)


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` of them: lines that can be mutated at equal distances, from each one mutant."""
    generator = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    on_line = list(lines.values())
    count = min(count, len(on_line))
    first = generator.random()
    return [generator.choice(on_line[int((i + first) * len(on_line) / count)]) for i in range(count)]


def functions(node: ast.AST, around: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions below a node, with names such as "Class.method"."""
    for inner in ast.iter_child_nodes(node):
        name = around
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            name = f"{around}.{inner.name}".lstrip(".")
        if isinstance(inner, ast.FunctionDef):
            yield name, inner
        yield from functions(inner, name)


def _changes(tree: ast.Module) -> Iterator[tuple[str | None, str, Any, ast.AST]]:
    """Function, operator, node and what stands in its place, of every mutant."""
    names = {node: name for name, node in functions(tree)}

    def visit(node: ast.AST, function: str | None) -> Iterator[tuple[str | None, str, Any, ast.AST]]:
        match node:
            case ast.FunctionDef(name="__repr__" | "__str__"):
                return
            case ast.FunctionDef():
                # Whoever comes first executes what is cached, and others find the result: all tests judge it.
                cached = any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
                function = None if cached else names[node]
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Call(func=called) | ast.Expr(value=ast.Call(func=called)) if _name(called) in MESSAGES:
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
        for operator, changed, replacement in _changes_of_node(node, function is not None):
            yield function, operator, changed, replacement
        for name, value in ast.iter_fields(node):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST) and name not in SKIPPED:
                    yield from visit(inner, function)

    return visit(tree, None)


def _changes_of_node(node: ast.AST, in_function: bool) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=others) if type(operator) in SWAPPED:
            yield "comparison", node, ast.Compare(left, [SWAPPED[type(operator)]()], others)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPPED:
            if not any(isinstance(side, ast.JoinedStr) or _is(side, str) for side in (left, right)):
                yield "arithmetic", node, ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.BoolOp(op=operator, values=values):
            yield "logic", node, ast.BoolOp(SWAPPED[type(operator)](), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", node, operand
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", node, ast.Constant(changed)) for changed in (value + 1, value - 1))
        case ast.Constant(value=float(value)):
            yield "constant", node, ast.Constant(2 * value if value else 1.0)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as returned) if not _is(returned, type(None)):
            yield "return", returned, ast.Constant(None)
        # Without a name's only assignment, whatever reads it fails: that says little about the tests.
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if in_function:
            yield "statement", node, ast.Pass()
        case ast.AugAssign(target=target, op=operator, value=value):
            yield "statement", node, ast.Pass()
            if type(operator) in SWAPPED:
                yield "arithmetic", node, ast.AugAssign(target, SWAPPED[type(operator)](), value)


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def _name(function: ast.AST) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))
