"""Every small mistake that a file can be given, as an edit of its text. Part of benchmarks/mutants.py.

An edit replaces one piece of the text, so comments and format stay. Left alone: strings, what is printed, logged or
raised, ``__repr__``, annotations and decorators.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
LOGIC = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
MESSAGES = {"print", "warn", "warning", "info", "debug", "error", "exit"}  # calls whose arguments only tell somebody


@dataclass(frozen=True)
class Mutant:
    """A file's text but for the bytes from ``start`` to ``end``, which are ``text``."""

    file: str  # relative to the root
    line: int
    operator: str
    start: int
    end: int
    text: str
    statement: int | None = None  # line of the innermost statement of a function; None: what an import executes
    before: str = ""  # the lines, on one
    after: str = ""

    @property
    def key(self) -> str:
        """What it is known by: lines above may come and go."""
        return f"{self.file}: {self.operator}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """All mutants of a file, each a program that compiles, in the order of their lines."""
    source = file.read_bytes()
    made: dict[str, Mutant] = {}
    for mutant in _Maker(str(file.relative_to(root)), source).visit(ast.parse(source), None):
        first = source.rfind(b"\n", 0, mutant.start) + 1
        last = (source + b"\n").find(b"\n", mutant.end)
        changed = source[first : mutant.start] + mutant.text.encode() + source[mutant.end : last]
        before, after = (" ".join(text.decode().split()) for text in (source[first:last], changed))
        mutant = replace(mutant, before=before, after=after)
        made.setdefault(mutant.key, mutant)
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


class _Maker:
    def __init__(self, file: str, source: bytes):
        self.file, self.source = file, source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def visit(self, node: ast.AST, statement: int | None) -> Iterator[Mutant]:
        """The mutants of a node and of all below it; statement: as in Mutant, of what stands around it."""
        match node:
            case ast.FunctionDef(name="__repr__" | "__str__"):
                return
            case ast.FunctionDef():
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else None  # of what a wrong default would change
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    yield from self.visit(default, statement or first)
                # An import, or whoever comes first, executes what is cached; others find the result.
                cached = any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
                for inner in body:
                    yield from self.visit(inner, None if cached else inner.lineno)
                return
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Call() if _name(node.func) in MESSAGES:
                return
            case ast.Expr(value=ast.Call(func=function)) if _name(function) in MESSAGES:
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
        if isinstance(node, ast.stmt) and statement is not None:
            statement = node.lineno
        for operator, start, end, text in self._edits(node, statement is not None):
            yield Mutant(self.file, self._line(start), operator, start, end, text, statement)
        skipped = {"annotation", "returns", "decorator_list", "msg"}
        for name, value in ast.iter_fields(node):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST) and name not in skipped:
                    yield from self.visit(inner, statement)

    def _edits(self, node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, int, str]]:
        """Operator and edit (start, end, text) of each mutant of this very node."""
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
                yield from self._between(left, right, "comparison", *COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                if not any(isinstance(side, ast.JoinedStr) or _is(side, str) for side in (left, right)):
                    yield from self._between(left, right, "arithmetic", *ARITHMETIC[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from self._between(left, right, "logic", *LOGIC[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "negation", *self._range(node), self._text(operand)
            case ast.Constant(value=bool(value)):
                yield "constant", *self._range(node), str(not value)
            case ast.Constant(value=int(value)):
                yield "constant", *self._range(node), str(value + 1)
                yield "constant", *self._range(node), str(value - 1)
            case ast.Constant(value=float(value)):
                yield "constant", *self._range(node), repr(2 * value if value else 1.0)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield "condition", *self._range(test), f"not ({self._text(test)})"
            case ast.Return(value=ast.expr() as value) if not _is(value, type(None)):
                yield "return", *self._range(value), "None"
            case ast.Call(args=[a, b, *_]) if not any(isinstance(x, ast.Starred) for x in (a, b)):
                if self._text(a) != self._text(b):
                    between = self.source[self._range(a)[1] : self._range(b)[0]].decode()
                    swapped = self._text(b) + between + self._text(a)
                    yield "arguments", self._range(a)[0], self._range(b)[1], swapped
            case ast.Expr(value=ast.Call()) if in_function:
                yield "statement", *self._range(node), "pass"
            case ast.AugAssign(target=target, op=operator, value=value):
                yield "statement", *self._range(node), "pass"
                if type(operator) in ARITHMETIC:
                    yield from self._between(target, value, "arithmetic", *ARITHMETIC[type(operator)])
            # Without a name's only assignment, whatever reads it fails: that says little about the tests.
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if in_function:
                yield "statement", *self._range(node), "pass"

    def _between(self, left: ast.expr, right: ast.expr, name: str, old: str, new: str) -> Iterator:
        """An edit of the operator between two operands."""
        start, end = self._range(left)[1], self._range(right)[0]
        gap = self.source[start:end].decode()
        found = re.search(rf"\b{old}\b" if old[-1].isalpha() else old, gap)
        if found and "#" not in gap:
            yield name, start + found.start(), start + found.end(), new

    def _range(self, node: ast.AST) -> tuple[int, int]:
        """Its first byte, and that behind it."""
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, end = self._range(node)
        return self.source[start:end].decode()

    def _line(self, start: int) -> int:
        return self.source.count(b"\n", 0, start) + 1


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def _name(function: ast.AST) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))
