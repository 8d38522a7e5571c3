"""A job goes on wherever it was killed, and its output equals an undisturbed job's."""

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.text import corpus
from megatron_zpp.data.text.corpus import Reading
from megatron_zpp.data.text.preprocessing import Job, preprocess
from tests.crashes import run_killed
from tests.data.small_data import bytes_of

KEYS = ("text", "title")
SUFFIXES = ("bin", "idx", "tokenizer.json")
TEXTS = [{"text": f"document {i} " + "words " * (i % 97), "title": f"title {i}"} for i in range(150)]
LINES = [*map(json.dumps, TEXTS)]


@pytest.fixture(scope="module", autouse=True)
def two_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", 32 << 10)
        yield


def job_in(folder: Path, **more) -> Job:
    source = folder / "in.jsonl"
    if not source.exists():
        source.write_text("\n".join(LINES) + "\n")
    settings = {"reading": Reading(KEYS), "append_eod": True, "save_seconds": 0} | more
    return Job((str(source),), str(folder / "out"), {"tokenizer_type": "ByteTokenizer"}, **settings)


def run(job: Job):
    return preprocess(job, lambda state, total: None, lambda note: None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "not" / "yet"  # the job makes it
    run(dataclasses.replace(job_in(folder.parents[1]), output_prefix=str(folder / "out")))
    files = bytes_of(folder)
    assert set(files) == {f"out_{key}_document.{suffix}" for key in KEYS for suffix in SUFFIXES}
    titles = IndexedDataset(folder / "out_title_document")
    assert bytes(titles[149][:-1].tolist()) == b"title 149"
    return files


def test_a_job_goes_on_from_every_change_of_files_at_which_it_is_killed(tmp_path, undisturbed):
    folder, fatal, kills = tmp_path, 1, 0
    while True:
        for path in list(bytes_of(folder)):
            (folder / path).unlink()
        status = run_killed(lambda: run(job_in(folder, save_seconds=1e9)), fatal)  # saved once, before the end
        if status is None:
            break
        assert status == -signal.SIGKILL
        kills += 1
        files = bytes_of(folder)
        for name in files.keys() & undisturbed.keys():  # nothing half done has a final name
            assert files[name] == undisturbed[name]
        run(job_in(folder))
        assert bytes_of(folder) == undisturbed, fatal
        fatal += 1
    assert kills > 20
    assert bytes_of(folder) == undisturbed


def test_bad_lines_that_come_only_after_a_kill_are_listed_alone(tmp_path, undisturbed):
    (tmp_path / "in.jsonl").write_text("\n".join([*LINES, "no JSON"]) + "\n")  # in the second block
    saved = {"skip_bad": True, "save_seconds": 0}
    fatal = 1
    while True:  # until it is killed with the first block saved
        assert run_killed(lambda: run(job_in(tmp_path, **saved)), fatal) == -signal.SIGKILL
        state = tmp_path / "out.unfinished.json"
        if state.exists() and json.loads(state.read_text())["state"]["block"] == 1:
            break
        fatal += 1
    run(job_in(tmp_path, **saved))
    files = bytes_of(tmp_path)
    listed = files.pop("out.bad_lines.txt").decode()
    assert listed.startswith(f"{tmp_path}/in.jsonl:151: ") and listed.count("\n") == 1
    assert files == undisturbed


def test_an_old_output_stays_until_the_new_one_is_whole(tmp_path, undisturbed):
    run(job_in(tmp_path))
    old = bytes_of(tmp_path)
    (tmp_path / "in.jsonl").write_text("\n".join([*LINES[:140], "{"]) + "\n")
    with pytest.raises(ValueError, match=r"in\.jsonl:141"):
        run(job_in(tmp_path))
    assert {name: content for name, content in bytes_of(tmp_path).items() if name in old} == old
    run(job_in(tmp_path, skip_bad=True))
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 140


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"job": 3}', '{"job": {}, "state": {"block": 1}}'])
def test_a_damaged_state_is_named_and_the_old_output_stays(tmp_path, content):
    run(job_in(tmp_path))
    old = bytes_of(tmp_path)
    (tmp_path / "out.unfinished.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"out\.unfinished\.json (is not JSON|holds no JSON object|is damaged .*--restart)"
    ):
        run(job_in(tmp_path))
    run(job_in(tmp_path, restart=True))
    assert bytes_of(tmp_path) == old


def test_the_lock_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "out.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"out\.lock"):
        run(job_in(tmp_path))
    assert (tmp_path / "victim").read_text() == "keep"
