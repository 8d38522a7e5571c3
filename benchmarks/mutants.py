"""Mutation tests of megatron_zpp: does the suite notice small mistakes in the code?

    python benchmarks/mutants.py record                # once: which test executes which statement; or some: tests/data
    python benchmarks/mutants.py run                   # the tests against 160 mutants; --only data/indices.py: some
    python benchmarks/mutants.py run --recheck         # those that survived, again, without --budget
    python benchmarks/mutants.py list                  # the mutants that run would take
    python benchmarks/mutants.py table                 # what is in the results, as Markdown

A mutant is the package with one operator, constant, condition, call or return value changed; seed and count choose
them, at equal distances over the lines of the folders. ``run`` gives each to the tests that execute its line, the quick
and special ones first, until one fails: no other test can tell the mutant from the original. What an import executes,
such as a constant, is given to all tests. Killed, both go on where they were.

The results are JSON lines. Read those that survived, and give each a field "judgement": "equivalent: why", where no
test could see it, or what is missing. It is kept when the mutant is tested again.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from common import RESULTS as FOLDER
from common import ROOT, markdown_table, new_parser, read_rows
from mutants_made import Mutant, draw, mutants_of
from mutants_recording import NOT_COPIED, Recording, files_in, record

RECORDING = ROOT / "runs" / "mutants" / "recording.jsonl"
RESULTS = FOLDER / "mutants.jsonl"
FOLDERS = ("megatron_zpp/zeropp", "megatron_zpp/training", "megatron_zpp/data")
ALIVE = ("survived", "unfinished")
COLLECTION = "collection"  # in place of a test: importing the tests, and so the package


def main() -> None:
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record_ = commands.add_parser("record", help="run the tests, and write down what each executes")
    run = commands.add_parser("run", help="run the tests against mutants that have no result yet")
    list_ = commands.add_parser("list", help="print the mutants that run would take")
    table_ = commands.add_parser("table", help="print the results by folder, and what survived")
    record_.add_argument("tests", nargs="*", help="of pytest; default: what make test runs. Options behind --")
    run.add_argument("--budget", type=float, default=120, help="seconds for one mutant (default: %(default)s)")
    run.add_argument("--recheck", action="store_true", help="run all tests on what survived or is unfinished")
    for command in (record_, run):
        command.add_argument("--workers", type=int, default=2)
        command.add_argument("--recording", type=Path, default=RECORDING)
    for command in (run, list_):
        command.add_argument("--count", type=int, default=160)
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--only", default="", metavar="TEXT", help="mutants of files whose path holds it")
    for command in (run, table_):
        command.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.command == "record":
        sys.exit(record(ROOT, FOLDERS, args.recording, args.workers, args.tests))
    if args.command == "table":
        print(table(read_results(args.results).values()))
        return
    mutants = [mutant for file in files_in(ROOT, FOLDERS) for mutant in mutants_of(ROOT, file)]
    mutants = [mutant for mutant in draw(mutants, args.count, args.seed) if args.only in mutant.file]
    if args.command == "list":
        print(*(f"{mutant.line:4} {mutant.key}" for mutant in mutants), sep="\n")
        return
    results = read_results(args.results)
    wanted = ALIVE if args.recheck else (None,)
    mutants = [mutant for mutant in mutants if results.get(mutant.key, {}).get("outcome") in wanted]
    budget = math.inf if args.recheck else args.budget
    rows = run_mutants(ROOT, mutants, Recording(ROOT, args.recording), args.workers, budget)
    for number, row in enumerate(rows, 1):
        kept = {name: text for name, text in results.get(key(row), {}).items() if name == "judgement"}
        results[key(row)] = row | kept
        write_results(args.results, results.values())
        print(f"{number}/{len(mutants)} {row['outcome']} in {row['seconds']} s: {key(row)}", flush=True)
    print(table(results.values()))


def run_tests(tree: Path, limits: dict[str, float], scratch: Path) -> tuple[str, str]:
    """Run the tests that ``limits`` names, in this order, until one fails or takes longer than its seconds.

    Returns "passed", "failed" or "timeout", and the last test that ran. scratch: for temporary files and the output; it
    is emptied.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    output, test, deadline = scratch / "output.txt", COLLECTION, time.monotonic() + 120
    options = ["-x", "-v", "--no-header", "-p", "no:cacheprovider", f"--basetemp={scratch}/pytest", "-m", ""]
    environment = os.environ | {"PYTHONPATH": str(tree), "TMPDIR": str(scratch)}
    with open(output, "w") as file:
        streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        command = [sys.executable, "-m", "pytest", *options, *limits]
        tests = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **streams)
    try:
        while True:
            status, text = tests.poll(), output.read_text()
            places = {text.rfind(f"\n{name} "): name for name in limits}
            if max(places) >= 0 and places[max(places)] != test:
                test = places[max(places)]
                deadline = time.monotonic() + limits[test]
            if status is not None:
                passed = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
                return "passed" if passed else "failed", test
            if time.monotonic() > deadline:
                return "timeout", test
            time.sleep(0.1)
    finally:
        # End its processes; their children are this process's then, and so on.
        while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


class Worker:
    """A copy of the tree, in which one file after the other is mutated and tested."""

    def __init__(self, root: Path, folder: Path, recording: Recording):
        self.tree, self.scratch, self.recording = folder / "tree", folder / "scratch", recording
        shutil.copytree(root, self.tree, symlinks=True, ignore=NOT_COPIED)
        self.trusted = {COLLECTION}  # tests that were seen to pass here without a mutant
        self.distrusted: set[str] = set()
        self.times = itertools.count(1_000_000_000, 10)

    def judge(self, mutant: Mutant, budget: float) -> dict[str, Any]:
        """The row of a mutant: what became of it, and which test decided that."""
        start = time.monotonic()
        names = [name for name in self.recording.judges(mutant) if name not in self.distrusted]
        original = (self.tree / mutant.file).read_bytes()
        outcome, by, ran = "survived", "", 0
        for stage in self.recording.stages(names):
            if time.monotonic() - start > budget:
                outcome = "unfinished"
                break
            self._write(mutant.file, mutant.apply(original))
            try:
                outcome, by = run_tests(self.tree, stage, self.scratch)
            finally:
                self._write(mutant.file, original)
            if outcome == "passed":
                outcome, by, ran = "survived", "", ran + len(stage)
            elif self._passes_without(by, stage):
                outcome = "timeout" if outcome == "timeout" else "killed"
                break
            else:
                return self.judge(mutant, budget)
        known = {name: getattr(mutant, name) for name in ("file", "line", "operator", "before", "after")}
        seconds = round(time.monotonic() - start, 1)
        return known | {"outcome": outcome, "by": by, "ran": ran, "of": len(names), "seconds": seconds}

    def _passes_without(self, test: str, limits: dict[str, float]) -> bool:
        """Whether a test passes here on the tree as it is."""
        if test not in self.trusted:
            if run_tests(self.tree, {test: limits[test]}, self.scratch)[0] == "passed":
                self.trusted.add(test)
            else:
                print(f"note: {test} fails here without a mutant, and is left out", file=sys.stderr)
                self.distrusted.add(test)
        return test in self.trusted

    def _write(self, file: str, text: bytes) -> None:
        """With another time, in whole seconds: by that Python knows whether its compiled file is up to date."""
        (self.tree / file).write_bytes(text)
        os.utime(self.tree / file, times=(next(self.times),) * 2)


def run_mutants(root: Path, mutants: list[Mutant], recording: Recording, workers: int, budget: float) -> Iterator[dict]:
    """A row of each mutant, as they come."""
    # No TemporaryDirectory: a fork that a test makes and that ends as a program does would remove it.
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, fork, _start_worker, (root, folder, recording)) as pool:
            judged = [pool.submit(_judge, mutant, budget) for mutant in mutants]
            yield from (future.result() for future in as_completed(judged))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_worker: Worker  # of a process of the pool: a tree is too dear to be copied for each mutant


def _start_worker(root: Path, folder: Path, recording: Recording) -> None:
    global _worker
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed program leaves behind is this one's child
    _worker = Worker(root, Path(tempfile.mkdtemp(dir=folder)), recording)


def _judge(mutant: Mutant, budget: float) -> dict[str, Any]:
    return _worker.judge(mutant, budget)


def key(row: dict[str, Any]) -> str:
    """What a mutant is known by: its line's number may change."""
    return f"{row['file']}: {row['operator']}: {row['before']} -> {row['after']}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    return {key(row): row for row in read_rows(path)}


def write_results(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    in_order = sorted(rows, key=lambda row: (row["file"], row["line"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in in_order))


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: counts by folder, then every mutant that no test killed."""
    rows = list(rows)
    heads = ("folder", "mutants", "killed", "by a timeout", "survived", "unfinished", "equivalent")
    counted = []
    for folder in [*FOLDERS, ""]:
        some = [row for row in rows if row["file"].startswith(folder)]
        count = Counter(row["outcome"] for row in some)
        killed = count["killed"] + count["timeout"]
        same = sum(row.get("judgement", "").startswith("equivalent") for row in some)
        shares = [f"{killed / total:.1%}" if total else "-" for total in (len(some), len(some) - same)]
        outcomes = (killed, count["timeout"], count["survived"], count["unfinished"])
        counted.append([folder or "all", len(some), *outcomes, same, *shares])
    lines = [markdown_table([*heads, "killed of all", "killed of those that differ"], counted)]
    for row in (row for row in rows if row["outcome"] in ALIVE):
        lines.append(f"\n{row['file']}:{row['line']}, {row['outcome']} after {row['ran']} of {row['of']} tests")
        lines.append(f"  {row['before']}\n  {row['after']}\n  {row.get('judgement', 'not judged yet')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
