"""The mutation tests: what they change, which tests judge it, and that they tell noticed from equivalent mutants."""

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from mutants_made import Mutant, draw, mutants_of

from tests.conftest import ROOT

TOY = '''"""A package."""
LARGEST = 10  # metres


def clamp(x: int, limit: int = LARGEST) -> int:
    """At most ``limit``."""
    if x > limit:
        return limit
    return x  # unchanged


def root(x: int) -> int:
    assert x >= 0, f"{x + 1} of {x}"
    raise ValueError(f"{x} < 0", 3 + 4)
'''
TESTS = """import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def clamped():
    return subprocess.run([sys.executable, "-c", "from toy.scale import clamp; print(clamp(12), clamp(3))"],
                          capture_output=True, text=True).stdout


def test_the_largest(clamped):
    assert clamped.split()[0] == "10"


def test_in_between(clamped):
    assert clamped.split()[1] == "3"


def test_root():
    from toy.scale import root

    with pytest.raises(ValueError):
        root(4)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """The root of a package with one module and its tests."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    (tmp_path / "toy" / "scale.py").write_text(TOY)
    (tmp_path / "tests" / "test_scale.py").write_text(TESTS)
    return tmp_path


def _edits(made: list[Mutant], line: int) -> set[tuple[str, str]]:
    return {(mutant.operator, mutant.after) for mutant in made if mutant.line == line}


def _judged(toy: Path, recording: Path, changes: set[str]) -> list[dict]:
    """The rows of some mutants, made in a fresh process: run_mutants forks, which pytest's threads don't survive."""
    program = f"""if True:
        import json, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import mutants
        root = Path({str(toy)!r})
        made = [mutant for mutant in mutants.mutants_of(root, root / "toy" / "scale.py") if mutant.after in {changes!r}]
        recording = mutants.Recording(Path({str(recording)!r}))
        for row in mutants.run_mutants(root, made, recording, workers=1, budget=60):
            print(json.dumps(row))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(row) for row in done.stdout.splitlines()]


def test_mutants_are_edits_of_what_the_program_does(toy):
    made = mutants_of(toy, toy / "toy" / "scale.py")
    assert _edits(made, 2) == {("constant", "LARGEST = 11 # metres"), ("constant", "LARGEST = 9 # metres")}
    assert _edits(made, 7) == {("comparison", "if x >= limit:"), ("condition", "if not x > limit:")}
    assert _edits(made, 9) == {("return", "return None # unchanged")}
    assert _edits(made, 13) == {("comparison", 'assert x > 0, f"{x + 1} of {x}"')} | {
        ("constant", f'assert x >= {number}, f"{{x + 1}} of {{x}}"') for number in (1, -1)
    }
    assert {mutant.line for mutant in made} == {2, 7, 8, 9, 13}  # no docstring, annotation, message or raise


def test_every_mutant_is_another_program():
    files = [max((ROOT / folder).rglob("*.py"), key=lambda file: file.stat().st_size) for folder in mutants.FOLDERS]
    drawn = draw([mutant for file in files for mutant in mutants_of(ROOT, file)], count=30, seed=2)
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 30 and {mutant.file for mutant in drawn} == {
        str(file.relative_to(ROOT)) for file in files
    }
    for mutant in drawn:
        source = (ROOT / mutant.file).read_bytes()
        program = compile(mutant.apply(source), mutant.file, "exec", dont_inherit=True)
        assert program != compile(source, mutant.file, "exec", dont_inherit=True)


@pytest.mark.long
def test_the_noticed_mutant_is_killed_and_the_equivalent_one_survives(toy, tmp_path):
    """The tests see the package only in a program that they start, and only by a fixture that they share."""
    recording = tmp_path / "recording.jsonl"
    assert mutants.record(toy, ["toy"], recording, 0, []) == 0
    recorded = mutants.Recording(recording)
    made = {mutant.after: mutant for mutant in mutants_of(toy, toy / "toy" / "scale.py")}
    changes = ("if x >= limit:", "return None # unchanged", "LARGEST = 11 # metres")
    equivalent, noticed, constant = (made[after] for after in changes)
    largest, between, root = (f"tests/test_scale.py::test_{name}" for name in ("the_largest", "in_between", "root"))
    assert set(recorded.judges(equivalent)) == set(recorded.judges(noticed)) == {largest, between}
    assert set(recorded.judges(constant)) == {largest, between, root}
    rows = {row["after"]: row for row in _judged(toy, recording, set(changes))}
    assert [(rows[after]["outcome"], rows[after]["by"]) for after in changes] == [
        ("survived", ""),
        ("killed", between),
        ("killed", largest),
    ]
