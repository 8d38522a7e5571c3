"""Which statements each test executes, in whatever processes it starts. Part of benchmarks/mutants.py.

The recording runs in a copy of the tree in which the package's ``__init__.py`` ends with ``install()``: every process
that imports the package, forked or fresh, then marks each statement of a function that it executes in one byte of a
file, which all of them map. So a rank that is killed loses nothing. This module is a plugin of that pytest, too: it
clears the bytes before each test and writes down what they are after it.
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

JOB = "MUTANTS_JOB"  # variable of the environment: a JSON file that says what to record, as ``Job`` has it
HITS = "MUTANTS_HITS"  # the mapped file, one for each process of pytest


@dataclass(frozen=True)
class Job:
    first: dict[str, int]  # the path of each file to the byte of its line 0
    size: int  # bytes
    output: str  # the recording, JSON lines
    done: list[str]  # tests that are recorded already


def read_job() -> Job:
    return Job(**json.loads(Path(os.environ[JOB]).read_text()))


def first_bytes(files: Iterable[Path]) -> tuple[dict[str, int], int]:
    """The byte of each file's line 0, and how many bytes there are."""
    first, size = {}, 0
    for file in files:
        first[str(file)] = size
        size += len(file.read_bytes().splitlines()) + 1
    return first, size


class _Marks(ast.NodeTransformer):
    """Puts ``__hits__[N] = 1`` before each statement of a function; what an import executes stays as it is."""

    def __init__(self, first: int):
        self.first = first

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        docstring = ast.get_docstring(node) is not None
        node.body = [*node.body[:docstring], *self._marked(node.body[docstring:])] or node.body
        return node

    def _marked(self, body: list[Any]) -> list[Any]:
        marked = []
        for statement in body:
            mark = ast.parse(f"__hits__[{self.first + statement.lineno}] = 1").body[0]
            for node in ast.walk(mark):
                if hasattr(node, "lineno"):
                    ast.copy_location(node, statement)
            self._mark_blocks(statement)
            marked += [mark, statement]
        return marked

    def _mark_blocks(self, statement: Any) -> None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self.visit(statement)
            return
        for name in ("body", "orelse", "finalbody"):
            if getattr(statement, name, None):
                setattr(statement, name, self._marked(getattr(statement, name)))
        for inner in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            inner.body = self._marked(inner.body)


def install() -> None:
    """From now on, the recorded files are imported with marks."""
    if HITS in os.environ:
        with open(os.environ[HITS], "r+b") as file:
            hits = mmap.mmap(file.fileno(), 0)
    else:
        hits = mmap.mmap(-1, 1 << 20)  # a program whose test gave it another environment: nobody reads it
    builtins.__hits__ = hits  # type: ignore[attr-defined]
    first = read_job().first if JOB in os.environ else {}
    plain = SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> Any:
        if path in first:
            data = _Marks(first[path]).visit(ast.parse(data))
        return plain(self, data, path, **options)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anything imports the package."""
    os.environ[HITS] = f"{os.environ[JOB]}.{os.getpid()}"
    Path(os.environ[HITS]).write_bytes(bytes(read_job().size))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = set(read_job().done)
    items[:] = [item for item in items if item.nodeid not in done]


class _Executed:
    """What the test that runs now has executed, but for the fixtures that it shares with others."""

    def __init__(self) -> None:
        with open(os.environ[HITS], "r+b") as file:
            self.hits = mmap.mmap(file.fileno(), 0)
        self.job = read_job()
        self.lines: set[int] = set()
        self.elsewhere = 0.0  # seconds of fixtures

    def write(self, **row: Any) -> None:
        with open(self.job.output, "a") as output:
            output.write(json.dumps(row) + "\n")

    def take(self) -> set[int]:
        """The lines marked since the last call."""
        marked = self.hits[:]
        self.hits[:] = bytes(len(marked))
        return {number for number, hit in enumerate(marked) if hit}


EXECUTED = pytest.StashKey[_Executed]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[EXECUTED] = _Executed()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Functions that run while the package is imported: all tests depend on them."""
    executed = session.config.stash[EXECUTED]
    executed.write(imported=sorted(executed.take()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    executed = item.config.stash[EXECUTED]
    for module in list(sys.modules.values()):
        if module is getattr(item, "module", None) or getattr(module, "__file__", None) in executed.job.first:
            for value in list(vars(module).values()):  # what a test finds in a cache it would have executed
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    executed.take()
    executed.lines, executed.elsewhere = set(), 0.0
    start = time.monotonic()
    result = yield
    executed.write(
        test=item.nodeid,
        seconds=round(time.monotonic() - start - executed.elsewhere, 2),
        fixtures=[_key(definition) for definition in _fixtures(item)],
        lines=sorted(executed.lines | executed.take()),
    )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Generator:
    """What a shared fixture executes belongs to every test that uses it, not to the one that comes first."""
    executed = request.config.stash[EXECUTED]
    if fixturedef.scope == "function":
        return (yield)
    executed.lines |= executed.take()
    start = time.monotonic()
    try:
        return (yield)
    finally:
        seconds = time.monotonic() - start
        executed.elsewhere += seconds
        executed.write(fixture=_key(fixturedef), seconds=round(seconds, 2), lines=sorted(executed.take()))


def _key(fixturedef: pytest.FixtureDef) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname}"


def _fixtures(item: pytest.Item) -> list[pytest.FixtureDef]:
    found = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else []
    return [definitions[-1] for definitions in found if definitions[-1].scope != "function"]
