"""Which functions each test executes, in whatever processes it starts. Part of benchmarks/mutants.py.

The recording runs in a copy of the tree in which each function first marks one byte of a file that all processes map.
So a rank that is killed loses nothing. This module is a plugin of that pytest: it clears the bytes before each test,
and writes down what they are after it.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

JOB = "MUTANTS_JOB"  # variable of the environment: a JSON file with the functions' names and the recording's path
MARKS = '''"""One byte for each function: 1 since it was executed."""
import mmap, os

if "MUTANTS_MARKS" in os.environ:
    with open(os.environ["MUTANTS_MARKS"], "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)
else:  # a program whose test gave it another environment: nobody reads it
    marks = mmap.mmap(-1, 1 << 20)
'''


class Executed:
    """What tests execute, and apart from it what the fixtures execute that they share."""

    def __init__(self) -> None:
        job = json.loads(Path(os.environ[JOB]).read_text())
        self.functions, self.output = job["functions"], job["output"]
        with open(os.environ["MUTANTS_MARKS"], "r+b") as file:
            self.marks = mmap.mmap(file.fileno(), 0)
        self.test: set[str] = set()
        self.shared: dict[str, set[str]] = {}  # by fixture

    def take(self) -> set[str]:
        """The functions marked since the last call."""
        marked = self.marks[:]
        self.marks[:] = bytes(len(marked))
        return {name for name, mark in zip(self.functions, marked, strict=False) if mark}

    def write(self, functions: Iterable[str], **row: Any) -> None:
        with open(self.output, "a") as output:
            output.write(json.dumps({**row, "functions": sorted(functions)}) + "\n")


EXECUTED = pytest.StashKey[Executed]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything imports the package."""
    job = os.environ[JOB]
    os.environ["MUTANTS_MARKS"] = f"{job}.{os.getpid()}"  # one file for each process of pytest
    Path(os.environ["MUTANTS_MARKS"]).write_bytes(bytes(len(json.loads(Path(job).read_text())["functions"])))
    early_config.stash[EXECUTED] = Executed()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Functions that run while the package is imported: all tests depend on them."""
    executed = session.config.stash[EXECUTED]
    executed.write(executed.take(), test=None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    executed = item.config.stash[EXECUTED]
    for module in list(sys.modules.values()):
        if "__marks__" in vars(module):
            for value in list(vars(module).values()):  # what a test finds in a cache it would have executed
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    executed.take()
    executed.test.clear()
    start = time.monotonic()
    result = yield
    shared = (executed.shared.get(name, set()) for name in getattr(item, "fixturenames", ()))
    functions = executed.test.union(executed.take(), *shared)
    executed.write(functions, test=item.nodeid, seconds=round(time.monotonic() - start, 2))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Generator:
    """What a shared fixture executes belongs to every test that uses it, not to the one that comes first."""
    if fixturedef.scope == "function":
        return (yield)
    executed = request.config.stash[EXECUTED]
    executed.test |= executed.take()
    try:
        return (yield)
    finally:
        executed.shared.setdefault(fixturedef.argname, set()).update(executed.take())
