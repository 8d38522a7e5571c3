"""Mutation tests of megatron_zpp: does the suite notice small mistakes in the code?

    python benchmarks/mutants.py record                # once: which test executes which function; or some: tests/data
    python benchmarks/mutants.py run                   # the tests against 160 mutants; --only data/indices.py: some
    python benchmarks/mutants.py run --since COMMIT    # in lines that are newer than this commit
    python benchmarks/mutants.py run --recheck         # those that survived, again, without --budget
    python benchmarks/mutants.py table                 # the results, as Markdown

``run`` gives each mutant to the tests that execute its function, the quick and special ones first, until one fails.
What an import executes, such as a constant, is given to all tests. Killed, ``run`` goes on where it was. The page
docs/evidence/benchmarks.md says how to read the results.
"""

import ast
import ctypes
import functools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mutants_recorder as recorder
from common import RESULTS as FOLDER
from common import ROOT, append_row, markdown_table, new_parser, read_rows
from mutants_made import Mutant, draw, functions, key, mutants_of

RECORDING = ROOT / "runs" / "mutants" / "recording.jsonl"
RESULTS = FOLDER / "mutants.jsonl"
NEWER = FOLDER / "mutants_newer.jsonl"
FOLDERS = ("megatron_zpp",)
ALIVE = ("survived", "unfinished")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "build", "__pycache__", ".*_cache", ".hypothesis")


def main() -> None:
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record_ = commands.add_parser("record", help="run the tests, and write down what each executes")
    run = commands.add_parser("run", help="run the tests against mutants that have no result yet")
    table_ = commands.add_parser("table", help="print the results by folder, and what survived")
    record_.add_argument("tests", nargs="*", help="of pytest; default: what make test runs. Options behind --")
    for command in (run, table_):
        command.add_argument("--results", type=Path, default=RESULTS, help="default: benchmarks/results/mutants.jsonl")
    run.add_argument("--budget", type=float, default=120, help="seconds for one mutant (default: %(default)s)")
    run.add_argument("--recheck", action="store_true", help="run all tests on what survived or is unfinished")
    for command in (record_, run):
        command.add_argument("--workers", type=int, default=2)
    run.add_argument("--count", type=int, default=160)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--only", default="", metavar="TEXT", help="mutants of files whose path holds it")
    run.add_argument("--since", metavar="COMMIT", help="mutants of lines that it does not have")
    args = parser.parse_args()
    if args.command == "record":
        sys.exit(record(ROOT, FOLDERS, RECORDING, args.workers, args.tests))
    if args.command == "table":
        measured = read_results(args.results).values()
        print(counts(measured) + alive(measured))
        return
    mutants = [mutant for file in files_in(ROOT, FOLDERS) for mutant in mutants_of(ROOT, file)]
    if args.since:
        added = lines_since(args.since)
        mutants = [mutant for mutant in mutants if mutant.line in added.get(mutant.file, ())]
    if not args.recheck:  # else the results' mutants, wherever their lines are by now
        mutants = draw(mutants, args.count, args.seed)
    mutants = [mutant for mutant in mutants if args.only in mutant.file]
    if not RECORDING.exists():
        sys.exit(f"error: there is no {RECORDING}: run python benchmarks/mutants.py record first")
    results = read_results(args.results)
    wanted = ALIVE if args.recheck else (None,)
    mutants = [mutant for mutant in mutants if results.get(key(vars(mutant)), {}).get("outcome") in wanted]
    budget = math.inf if args.recheck else args.budget
    rows = run_mutants(ROOT, mutants, Recording(RECORDING), args.workers, budget)
    for number, row in enumerate(rows, 1):
        kept = {name: text for name, text in results.get(key(row), {}).items() if name == "judgement"}
        results[key(row)] = row | kept
        append_row(args.results, results[key(row)])
        print(f"{number}/{len(mutants)} {row['outcome']} in {row['seconds']} s: {key(row)}", flush=True)
    print(counts(results.values()) + alive(results.values()))


def files_in(root: Path, folders: Iterable[str]) -> list[Path]:
    return [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def lines_since(commit: str) -> dict[str, set[int]]:
    """The lines of each file that the working tree has and ``commit`` has not, moved files aside."""
    command = ["git", "diff", "--unified=0", "--find-renames", "--no-prefix", commit, "--", *FOLDERS]
    added: dict[str, set[int]] = {}
    for line in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if line.startswith("+++ "):
            lines = added.setdefault(line.removeprefix("+++ "), set())
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines.update(range(first, first + count))
    return added


def record(root: Path, folders: Iterable[str], recording: Path, workers: int, options: list[str]) -> int:
    """Run tests in a copy of the tree whose functions leave marks, and add a row for each; return pytest's status."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, job = Path(folder) / "tree", Path(folder) / "job.json"
        shutil.copytree(root, tree, symlinks=True, ignore=NOT_COPIED)
        shutil.copy(recorder.__file__, folder)
        names: list[str] = []
        for file in files_in(tree, folders):
            name = file.relative_to(tree)
            file.write_text(marked(file.read_text(), str(name), names))
            (tree / name.parts[0] / "_marks.py").write_text(recorder.MARKS)
        recording.parent.mkdir(parents=True, exist_ok=True)
        job.write_text(json.dumps({"functions": names, "output": str(recording.resolve())}))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), folder]), recorder.JOB: str(job)}
        in_parallel = ["-n", str(workers), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants_recorder", *in_parallel, *options]
        return subprocess.run(command, cwd=tree, env=environment).returncode


def marked(source: str, file: str, names: list[str]) -> str:
    """The text of a file in which each function first sets a byte; its name is added to ``names`` at that byte."""
    tree = ast.parse(source)
    for function, node in functions(tree):
        place = int(ast.get_docstring(node) is not None)
        node.body.insert(place, ast.parse(f"__marks__[{len(names)}] = 1").body[0])
        names.append(f"{file}: {function}")
    begin = int(ast.get_docstring(tree) is not None)
    while begin < len(tree.body) and getattr(tree.body[begin], "module", "") == "__future__":
        begin += 1
    tree.body.insert(begin, ast.parse(f"from {Path(file).parts[0]}._marks import marks as __marks__").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


class Recording:
    """Which tests execute a function, and in how many seconds."""

    def __init__(self, path: Path) -> None:
        rows = {row["test"]: row for row in read_rows(path)}  # the last row of a test that was recorded again
        for test in [test for test in rows if test and "NOTSET]" in test]:  # the marked files have no such parameters
            del rows[test]
        self.imported = set(rows.pop(None)["functions"])
        self.seconds = {test: row["seconds"] for test, row in rows.items()}
        self.functions = {test: set(row["functions"]) for test, row in rows.items()}

    def judges(self, mutant: Mutant) -> list[str]:
        """The tests that may notice it, the quick and special ones first."""
        name = f"{mutant.file}: {mutant.function}"
        if mutant.function is not None and name not in self.imported:
            return self._in_order(test for test, executed in self.functions.items() if name in executed)
        in_file = f"{mutant.file}: "
        near = {test for test, executed in self.functions.items() if any(f.startswith(in_file) for f in executed)}
        return [*self._in_order(near), *self._in_order(self.functions.keys() - near)]

    def _in_order(self, tests: Iterable[str]) -> list[str]:
        """File by file, those with the quickest and most special tests first."""
        costs = {test: ((0.1 + self.seconds[test]) * (1 + len(self.functions[test])), test) for test in tests}
        files: dict[str, list[str]] = {}
        for test in sorted(costs, key=costs.__getitem__):
            files.setdefault(test.partition("::")[0], []).append(test)
        return [test for of_file in files.values() for test in of_file]


def run_mutants(root: Path, mutants: list[Mutant], recording: Recording, workers: int, budget: float) -> Iterator[dict]:
    """A row of each mutant, as they come."""
    with multiprocessing.get_context("fork").Pool(workers, _adopt_orphans) as pool:
        yield from pool.imap_unordered(functools.partial(judge, root, recording, budget), mutants)


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed program leaves behind is this one's child


def judge(root: Path, recording: Recording, budget: float, mutant: Mutant) -> dict[str, Any]:
    """The row of a mutant: what became of it, and which test decided that."""
    start, tests = time.monotonic(), recording.judges(mutant)
    judges, outcome, by = tests, "survived", ""
    while judges and outcome == "survived":
        hangs_after = 60 + 6 * sum(recording.seconds[test] for test in judges)
        found, by = run_tests(root, mutant, tuple(judges), min(budget, hangs_after))
        # Tests that fail without a mutant, too, say nothing: the others run again.
        blamed = (by,) if by else tuple(judges)
        if found == "passed":
            break
        if found == "timeout" and budget < hangs_after:
            outcome = "unfinished"
        elif run_tests(root, None, blamed, hangs_after)[0] == "passed":
            outcome = found
        else:
            judges = [test for test in judges if test not in blamed]
    known = {name: getattr(mutant, name) for name in ("file", "line", "operator", "before", "after")}
    seconds = round(time.monotonic() - start, 1)
    return known | {"outcome": outcome, "by": by, "ran": len(judges), "of": len(tests), "seconds": seconds}


def run_tests(root: Path, mutant: Mutant | None, tests: tuple[str, ...], limit: float) -> tuple[str, str]:
    """Run tests on a copy of the tree until one fails; return "passed", "killed" or "timeout", and by which test."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree, scratch = Path(folder) / "tree", Path(folder) / "scratch"
        scratch.mkdir()
        shutil.copytree(root, tree, symlinks=True, ignore=NOT_COPIED)
        if mutant is not None:
            (tree / mutant.file).write_bytes(mutant.apply((root / mutant.file).read_bytes()))
        options = ["-x", "-q", "-rfE", "-m", "", "-p", "no:cacheprovider", f"--basetemp={scratch}/pytest"]
        environment = os.environ | {"PYTHONPATH": str(tree), "TMPDIR": str(scratch), "COLUMNS": "1000"}
        with open(Path(folder) / "output", "w+") as output:
            streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            command = [sys.executable, "-m", "pytest", *options, *tests]
            process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **streams)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return "timeout", ""
            finally:
                # End its processes; their children are this process's then, and so on.
                while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    for child in map(int, children):
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
            output.seek(0)
            lines = output.read().splitlines()
    if status in (0, 5):  # passed, or nothing was collected
        return "passed", ""
    named = (test for line in lines for test in tests if line.startswith((f"FAILED {test}", f"ERROR {test}")))
    return "killed", max(named, key=len, default="")


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each mutant, in the order of files and lines."""
    return {key(row): row for row in sorted(read_rows(path), key=lambda row: (row["file"], row["line"]))}


def table(path: Path = RESULTS) -> str:
    """Return the results' counts by folder as Markdown."""
    return counts(read_results(path).values())


def counts(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    heads = ("folder", "mutants", "killed", "by a timeout", "survived", "unfinished", "equivalent")
    counted = []
    for folder in [*sorted({"/".join(row["file"].split("/")[:2]) for row in rows}), ""]:
        some = [row for row in rows if row["file"].startswith(folder)]
        count = Counter(row["outcome"] for row in some)
        killed = count["killed"] + count["timeout"]
        same = sum(row.get("judgement", "").startswith("equivalent") for row in some)
        share = f"{killed / len(some):.1%}" if some else "-"
        outcomes = (killed, count["timeout"], count["survived"], count["unfinished"])
        counted.append([folder or "all", len(some), *outcomes, same, share])
    return markdown_table([*heads, "killed of all"], counted)


def alive(rows: Iterable[dict[str, Any]]) -> str:
    """Every mutant that no test killed."""
    lines = []
    for row in (row for row in rows if row["outcome"] in ALIVE):
        lines.append(f"\n{row['file']}:{row['line']}, {row['outcome']} after {row['ran']} of {row['of']} tests")
        lines.append(f"  {row['before']}\n  {row['after']}\n  {row.get('judgement', 'not judged yet')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
