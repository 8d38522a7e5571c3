"""Stored results say what they were measured with."""

import json
import subprocess

import common
import pytest

FIELDS = ("commit", "date", "command", "torch", "processor", "cores", "load")
# Figures of others, what the planner says of them, and faults that are to be tried.
NOT_MEASURED = ("published_throughput.jsonl", "planner_parts.json", "holes_list.jsonl")
DOCS = common.ROOT / "docs"
FILES = [path for path in sorted(common.RESULTS.glob("**/*.json*")) if path.name not in NOT_MEASURED]


def untraceable(row: dict) -> list[str]:
    """Name the fields that do not say where a row comes from.

    Before November 27, 2026 nothing wrote them: null is what was not recorded, and the commit is the one that stored
    the row.
    """
    is_old = (row.get("date") or "9") < "2026-11-27"
    missing = [name for name in FIELDS if name not in row or (row[name] is None and not is_old)]
    wrong = not row.get("commit") or row["commit"] == "unknown" or row["commit"].endswith("-dirty")
    return sorted({*missing, *(["commit"] if wrong else [])})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(common.RESULTS)))
def test_every_stored_row_can_be_traced_to_code_command_and_machine(path):
    rows = common.read_rows(path) if path.suffix == ".jsonl" else [json.loads(path.read_text())]
    assert rows
    assert {i: found for i, row in enumerate(rows, 1) if (found := untraceable(row))} == {}


def test_a_row_says_whether_the_code_that_made_it_was_committed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        done = subprocess.run(["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    git("add", ".")
    git("commit", "-qm", "x")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results" / "rows.jsonl").write_text("{}\n")
    git("add", ".")  # a stored result is no change of the code
    assert common.commit() == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "code.py").write_text("2\n")
    assert common.commit() == git("rev-parse", "--short=12", "HEAD") + "-dirty"


def test_the_writer_adds_where_a_row_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "COMMIT_AT_START", "3971d26e")
    common.append_row(tmp_path / "rows.jsonl", {"seconds": 1.0})
    common.append_row(tmp_path / "rows.jsonl", {"seconds": 2.0, "command": "python train.py"})
    first, second = common.read_rows(tmp_path / "rows.jsonl")
    assert untraceable(first) == untraceable(second) == []
    assert second["command"] == "python train.py"  # a program that starts others names what it started


def test_the_readme_quotes_powersgd_and_the_planner_as_their_pages_do():
    def cells(page: str, name: str, row: str) -> list[str]:
        table = (DOCS / f"evidence/{page}.md").read_text().partition(f"<!-- {name} -->")[2]
        line = next(line for line in table.splitlines() if line.startswith(f"| {row} | "))
        return [cell.split(" (")[0].strip() for cell in line.split("|")[2:]]

    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    one, eight, *_ = cells("peers", "ratios", "DDP, PowerSGD of rank 4")  # micro-batches
    loss = cells("experiments", "headline", "80 exact steps")[1]
    assert f"PowerSGD, which shards nothing, takes {one} / {eight} times `int8`'s time at 100 Mbit/s" in readme
    assert f"at 100 Mbit/s, ending {loss} over bf16's loss" in readme
    error = cells("planner", "published", "all of H100")[5].replace("%", " %")
    assert f"is {error} off in the median" in readme
