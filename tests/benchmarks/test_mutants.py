"""The mutation tests: what they change, and that each change makes another program."""

import mutants
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


def _edits(made: list[Mutant], line: int) -> set[tuple[str, str]]:
    return {(mutant.operator, mutant.after) for mutant in made if mutant.line == line}


def test_mutants_are_edits_of_what_the_program_does(tmp_path):
    (tmp_path / "scale.py").write_text(TOY)
    made = mutants_of(tmp_path, tmp_path / "scale.py")
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
