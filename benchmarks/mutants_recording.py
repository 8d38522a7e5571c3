"""Which tests judge a mutant: those that execute its statement. Part of benchmarks/mutants.py.

A recording is JSON lines: the recorded files, then what each shared fixture and each test executes. Lines are numbered
through all files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mutants_recorder as recorder
from mutants_made import Mutant

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache", ".hypothesis")
STAGES = (5, 30, 120)  # seconds of tests that run in one process before the next ones, which cost more, are needed


def files_in(root: Path, folders: Iterable[str]) -> list[Path]:
    return [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def record(root: Path, folders: Iterable[str], recording: Path, workers: int, options: list[str]) -> int:
    """Run the tests that are not recorded yet in a marked copy of the tree; returns pytest's status."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, job = Path(folder) / "tree", Path(folder) / "job.json"
        shutil.copytree(root, tree, symlinks=True, ignore=NOT_COPIED)
        shutil.copy(recorder.__file__, folder)
        files = files_in(tree, folders)
        first, size = recorder.first_bytes(files)
        names = [str(file.relative_to(tree)) for file in files]
        of_root = {name: (first[str(tree / name)], _hash(root / name)) for name in names}
        install = f"\nimport sys\nsys.path.append({folder!r})\nimport mutants_recorder\nmutants_recorder.install()\n"
        for package in {Path(name).parts[0] for name in names}:
            with open(tree / package / "__init__.py", "a") as init:
                init.write(install)
        tests = {str(file.relative_to(root)): _hash(file) for file in files_in(root, ["tests"])}
        rows = _rows_to_keep(recording, of_root, tests)
        recording.parent.mkdir(parents=True, exist_ok=True)
        recording.write_text("".join(json.dumps(row) + "\n" for row in [{"files": of_root, "tests": tests}, *rows]))
        done = [row["test"] for row in rows if "test" in row]
        job.write_text(json.dumps(asdict(recorder.Job(first, size, str(recording.resolve()), done))))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), folder]), recorder.JOB: str(job)}
        in_parallel = ["-n", str(workers), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants_recorder", *in_parallel, *options]
        return subprocess.run(command, cwd=tree, env=environment).returncode


def _rows_to_keep(recording: Path, files: dict[str, tuple[int, str]], tests: dict[str, str]) -> list[dict[str, Any]]:
    """What an earlier recording of the same code says of tests that have not changed."""
    if not recording.exists():
        return []
    head, *rows = _read(recording)
    if {name: tuple(entry) for name, entry in head["files"].items()} != files:
        return []
    same = {name for name, hashed in head["tests"].items() if tests.get(name) == hashed}
    return [row for row in rows if "test" not in row or row["test"].partition("::")[0] in same]


def _read(path: Path) -> list[dict[str, Any]]:
    """Its rows; one that was being written when the program was killed is left out."""
    return [json.loads(row) for row in path.read_text().split("\n")[:-1]]


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass
class Test:
    seconds: float = 0.0
    fixtures: float = 0.0  # seconds of what it shares with others
    lines: set[int] = field(default_factory=set)


class Recording:
    """Which tests execute a statement."""

    def __init__(self, root: Path, path: Path):
        if not path.exists():
            sys.exit(f"error: there is no {path}: run python benchmarks/mutants.py record first")
        head, *rows = _read(path)
        self.files: dict[str, tuple[int, str]] = head["files"]
        recorded = {row["test"].partition("::")[0] for row in rows if "test" in row}
        hashes = {name: hashed for name, (_, hashed) in self.files.items()}
        hashes |= {name: head["tests"][name] for name in recorded}
        changed = [name for name in hashes if not (root / name).exists() or _hash(root / name) != hashes[name]]
        if changed:
            sys.exit(f"error: {changed[0]} is not as it was recorded: run python benchmarks/mutants.py record again")
        fixtures: dict[str, Test] = {}
        for row in rows:
            if "fixture" in row:
                fixture = fixtures.setdefault(row["fixture"], Test())
                fixture.seconds = max(fixture.seconds, row["seconds"])
                fixture.lines.update(row["lines"])
        self.imported = set().union(*(row["imported"] for row in rows if "imported" in row))
        self.tests: dict[str, Test] = {}
        for row in rows:
            if "test" in row:
                used = [fixtures[name] for name in row["fixtures"] if name in fixtures]
                lines = set(row["lines"]).union(*(fixture.lines for fixture in used))
                self.tests[row["test"]] = Test(row["seconds"], sum(fixture.seconds for fixture in used), lines)

    def judges(self, mutant: Mutant) -> list[str]:
        """The tests that may notice it, the quick and special ones first."""
        first = self.files[mutant.file][0]
        if mutant.statement is not None and (line := first + mutant.statement) not in self.imported:
            return self._in_order(name for name, test in self.tests.items() if line in test.lines)
        behind = min((number for number, _ in self.files.values() if number > first), default=math.inf)
        near = {name for name, test in self.tests.items() if any(first <= line < behind for line in test.lines)}
        return [*self._in_order(near), *self._in_order(self.tests.keys() - near)]

    def _in_order(self, names: Iterable[str]) -> list[str]:
        def cost(name: str) -> float:
            test = self.tests[name]
            return (0.1 + test.seconds + test.fixtures) * (1 + len(test.lines))

        return sorted(sorted(names), key=cost)

    def stages(self, names: list[str]) -> Iterator[dict[str, float]]:
        """The tests, in groups that one process runs, file by file; and of each the seconds after which it hangs."""
        names, lengths = list(names), itertools.chain(STAGES, itertools.repeat(STAGES[-1]))
        while names:
            seconds, count, length = 0.0, 0, next(lengths)
            while count < len(names) and (count == 0 or seconds < length):
                seconds += self.tests[names[count]].seconds
                count += 1
            stage, names = names[:count], names[count:]
            in_order = list(dict.fromkeys(name.partition("::")[0] for name in stage))
            stage.sort(key=lambda name: in_order.index(name.partition("::")[0]))
            yield {name: 20 + 6 * (self.tests[name].seconds + self.tests[name].fixtures) for name in stage}
