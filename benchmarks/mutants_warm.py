"""Runs tests in a fork of this process, which has imported torch already. Part of benchmarks/mutants.py.

A test run saves the 5 seconds of importing torch; so do the ranks and programs that it starts, as multiprocessing's
fork server is forked from here, too. Nothing of the package is imported here: each run imports it from its own tree.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import traceback
import types
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

COLLECTION = "collection"  # in place of a test: importing the tests, and so the package


def warm_up() -> None:
    """Import what most tests import, but nothing of the package."""
    for name in ("numpy", "hypothesis", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"):
        if importlib.util.find_spec(name):
            importlib.import_module(name)


def adopt_orphans() -> None:
    """Have the kernel make the processes that a killed program leaves behind children of this one (Linux)."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def run_tests(tree: Path, limits: dict[str, float], scratch: Path) -> tuple[str, str]:
    """Run the tests that ``limits`` names, in this order of files, until one fails or takes longer than its seconds.

    Returns "passed", "failed", "crashed" or "timeout", and the last test that ran. scratch: for temporary files and the
    output; it is emptied.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if os.fork() == 0:
        _be_pytest(tree, list(limits), scratch, sender)
    sender.close()
    test, limit = COLLECTION, 120.0
    try:
        while receiver.poll(limit):
            outcome, test = receiver.recv()
            if outcome != "started":
                return outcome, test
            limit = limits[test]
        return "timeout", test
    except EOFError:
        return "crashed", test
    finally:
        receiver.close()
        _kill_children()


def _kill_children() -> None:
    """End them; then their children are this process's, and so on."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class _Reporter:
    """A plugin of pytest that runs the wanted tests and tells of each."""

    def __init__(self, sender: Connection, tests: Sequence[str]):
        self.sender, self.order, self.last = sender, {test: i for i, test in enumerate(tests)}, COLLECTION

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.last = nodeid
        self.sender.send(("started", nodeid))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        self.sender.send(("passed" if passed else "failed", self.last))


def _be_pytest(tree: Path, tests: list[str], scratch: Path, sender: Connection) -> NoReturn:
    try:
        os.setsid()
        with open(scratch / "output.txt", "w") as output, open(os.devnull) as nothing:
            for stream, number in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(stream.fileno(), number)
        os.chdir(tree)
        os.environ.update(PYTHONPATH=str(tree), TMPDIR=str(scratch))
        sys.path.insert(0, str(tree))
        sys.modules["__main__"] = types.ModuleType("__main__")  # or each rank would import this program's, too
        _fork_a_forkserver(scratch / "forkserver")
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--basetemp={scratch}/pytest", "-m", ""]
        pytest.main([*options, *files], plugins=[_Reporter(sender, tests)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _fork_a_forkserver(address: Path) -> None:
    """What ForkServer.ensure_running does, but that it forks this process instead of starting another Python."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(100)
    alive, hold = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(hold)
        select.select([listener.fileno(), alive], [], [])  # many tests never need it
        if importlib.util.find_spec("tests.ranks"):
            importlib.import_module("tests.ranks")  # says what the server imports
        try:
            forkserver.main(listener.detach(), alive, forkserver._forkserver._preload_modules)  # type: ignore
        finally:
            os._exit(0)
    listener.close()
    os.close(alive)
    running: Any = forkserver._forkserver
    running._forkserver_address, running._forkserver_alive_fd, running._forkserver_pid = str(address), hold, server
