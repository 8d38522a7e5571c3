"""tools/preprocess_data.py and train_tokenizer.py, and the quickstart's corpus, as a user starts them."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_zpp.commands.data import preprocess_data
from megatron_zpp.data.text.tokenizers import build_tokenizer
from tests.conftest import ROOT
from tests.data.small_data import bytes_of, read
from tests.data.test_golden import EXPECTED, corpus
from tests.tools import run

LINES = [json.dumps({"text": f"document {i} " + "words " * (i % 971)}) for i in range(1500)]  # 4 MB, 17 blocks
BAD_LINES = ["{", "[1]", '{"other": "x"}', '{"text": 3}', '{"text": ["x", 3]}', '{"text": "\\ud800"}']


def command(folder, *arguments):
    """Output prefix: folder/out."""
    words = [sys.executable, "tools/preprocess_data.py", "--input", str(folder / "in.jsonl"), *arguments]
    return [*words, "--output-prefix", str(folder / "out"), "--tokenizer-type", "ByteTokenizer"]


def preprocess(folder, lines, *arguments, status=0):
    """Run the tool on ``lines``, or on the last call's; return the process."""
    if lines is not None:
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return run(*command(folder, *arguments), status=status)


def documents(prefix):
    """Texts of each document's sequences, the end-of-document id as a bar."""
    return [["".join("|" if i == 256 else chr(i) for i in ids) for ids in document] for document in read(prefix)]


@pytest.mark.parametrize(("name", "workers"), [("a", 2), ("b", 1)])
def test_output_equals_megatrons_to_the_byte(tmp_path, name, workers):
    expected = EXPECTED["datasets"][name]
    texts = list(corpus(name))
    assert hashlib.sha256("".join(f"{t}\n" for t in texts).encode()).hexdigest() == expected["text_sha256"]
    preprocess(tmp_path, [json.dumps({"text": text}) for text in texts], "--append-eod", "--workers", str(workers))
    for suffix in ("bin", "idx"):
        digest = hashlib.sha256((tmp_path / f"out_text_document.{suffix}").read_bytes()).hexdigest()
        assert digest == expected[f"{suffix}_sha256"]


def test_keys_lists_and_empty_texts(tmp_path):
    lines = ['{"text": ["ab", "", "c"], "title": "T"}', "", '{"text": "", "title": "U"}', '{"text": "d", "title": "V"}']
    preprocess(tmp_path, lines, "--json-keys", "text", "title", "--append-eod")
    assert documents(tmp_path / "out_text_document") == [["ab", "c|"], [], ["d|"]]
    assert documents(tmp_path / "out_title_document") == [["T|"], ["U|"], ["V|"]]


def test_bad_lines_can_be_skipped(tmp_path):
    process = preprocess(tmp_path, ['{"text": "a"}', *BAD_LINES, '{"text": "b"}'], "--skip-bad-lines")
    assert f"2 documents, 2 tokens in {tmp_path}/out_text_document.bin; 6 bad lines skipped" in process.stdout
    listed = (tmp_path / "out.bad_lines.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{tmp_path}/in.jsonl:{number}" for number in range(2, 8)]
    assert process.stderr.splitlines() == [f"skipped {line}" for line in listed]
    assert documents(tmp_path / "out_text_document") == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", BAD_LINES[0]], "in.jsonl:3: Expecting"),
        (['{"text": "a"}', "", BAD_LINES[2]], "in.jsonl:3: no key 'text'; it has 'other'"),
        (['{"text": ""}'], "in.jsonl holds no text under 'text'"),
    ],
)
def test_bad_input_ends_the_job_and_leaves_no_file(tmp_path, lines, message):
    process = preprocess(tmp_path, lines, status=2)
    assert process.stderr.count("\n") == 1
    assert f"error: {tmp_path}/{message}" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# A job that ends before its end


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    preprocess(folder, LINES, "--append-eod")
    files = bytes_of(folder)
    assert set(files) == {f"out_text_document.{suffix}" for suffix in ("bin", "idx", "tokenizer.json")}
    return files


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_and_signal(words, folder, sent, documents):
    """Starts the tool and sends the signal when the saved state counts that many documents; returns its exit status."""
    (folder / "in.jsonl").write_text("\n".join(LINES) + "\n")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = folder / "out.unfinished.json"
    while process.poll() is None:
        if state.exists() and json.loads(state.read_text())["state"]["documents"] >= documents:
            workers = children(process.pid)
            process.send_signal(sent)
            status = process.wait(60)
            while any(map(is_running, workers)):  # they see that their parent is gone
                time.sleep(0.02)
            return status
        time.sleep(0.001)
    return process.returncode


@pytest.mark.parametrize(
    ("sent", "seed"), [(signal.SIGKILL, 1), pytest.param(signal.SIGTERM, 3, marks=pytest.mark.long)]
)
def test_a_job_that_is_killed_goes_on_and_its_workers_end(tmp_path, undisturbed, sent, seed):
    words = command(tmp_path, "--append-eod", "--workers", "2", "--save-seconds", "0")
    status = start_and_signal(words, tmp_path, sent, random.Random(seed).randrange(len(LINES) - 300))
    assert status == (-sent if sent == signal.SIGKILL else 128 + sent)
    assert not any(name.endswith((".bin", ".idx")) for name in bytes_of(tmp_path))
    assert "continuing after" in run(*words).stderr
    assert bytes_of(tmp_path) == undisturbed


def test_a_worker_that_dies_is_an_error_and_nothing_is_lost(tmp_path, undisturbed):
    (tmp_path / "in.jsonl").write_text("\n".join(LINES) + "\n")
    words = command(tmp_path, "--append-eod", "--workers", "2", "--save-seconds", "0")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.unfinished.json").exists():
        time.sleep(0.001)
    # Two workers, and multiprocessing's resource tracker.
    is_worker = {pid: b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(process.pid)}
    assert sum(is_worker.values()) == 2
    os.kill(next(pid for pid, worker in is_worker.items() if worker), signal.SIGKILL)
    assert "error: a worker process died" in process.communicate(timeout=60)[1]
    assert process.returncode == 2
    run(*words)
    assert bytes_of(tmp_path) == undisturbed


def test_another_job_does_not_go_on_with_what_it_finds(tmp_path):
    process = preprocess(tmp_path, [*LINES[:900], "{", *LINES[900:]], "--append-eod", status=2)
    assert f"error: {tmp_path}/in.jsonl:901: " in process.stderr
    process = preprocess(tmp_path, None, status=2)
    assert "out.unfinished.json is from an unfinished job with another append_eod: " in process.stderr
    process = preprocess(tmp_path, None, "--append-eod", "--skip-bad-lines")  # goes on
    assert "continuing after" in process.stderr
    assert process.stdout.startswith("1,500 documents, ")
    process = preprocess(tmp_path, None, "--restart", "--skip-bad-lines")
    assert "continuing after" not in process.stderr
    assert "1 bad lines skipped" in process.stdout


# Flags


def test_progress_shows_rates_and_the_time_left_and_megatrons_other_flags_are_noted(tmp_path):
    flags = ["--partitions", "2", "--chunk-size", "25", "--dataset-impl", "mmap", "--lang", "de"]
    process = preprocess(tmp_path, LINES, "--log-interval", "100", "--keep-sequential-samples", *flags)
    lines = process.stderr.splitlines()
    for flag in (*flags[::2], "--keep-sequential-samples"):
        assert f"note: {flag} has no effect" in process.stderr
    pattern = r"[\d.]+ %, [\d,]+ documents, [\d,]+ documents/s, [\d.,]+ MB/s, \d+:\d\d:\d\d left"
    assert len([line for line in lines if re.fullmatch(pattern, line)]) >= 5
    assert 80 < float(lines[-1].split(" %")[0]) <= 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split-sentences"], "our models read whole documents: leave it out"),
        (["--dataset-impl", "lazy"], "--dataset-impl"),
        (["--json-keys", "a", "a"], "--json-keys names a key twice"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        preprocess_data.parse_arguments([*command(Path("x"))[2:], *flags])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_two_runs_of_one_output_are_refused(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / "out.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is writing" in preprocess(tmp_path, LINES[:10], status=2).stderr


def test_one_text_that_its_tokenizer_refuses_does_not_harm_its_neighbours(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "5 9 5"}\n{"text": "7"}\n')
    words = [*command(tmp_path, "--append-eod")[:-1], "NullTokenizer", "--vocab-size", "9"]
    process = run(*words, "--skip-bad-lines")
    assert "ids 5 to 9 are not all below --vocab-size 9" in process.stderr
    assert "1 documents, 2 tokens" in process.stdout


def test_tokenizer_trained_on_the_quickstarts_corpus_keeps_source_code(tmp_path):
    corpus, model = tmp_path / "corpus.jsonl", tmp_path / "t.model"
    for output in (corpus, tmp_path / "again.jsonl"):
        run("python", "examples/quickstart/make_corpus.py", "--output", output, "--max-megabytes", 1)
    assert corpus.read_bytes() == (tmp_path / "again.jsonl").read_bytes()

    run("python", "tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 1000, "--output", model)
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    assert tokenizer.vocab_size == 1000
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert len({record["path"] for record in records}) == len(records) > 20
    assert 0.9e6 < sum(len(record["text"].encode()) for record in records) < 2e6
    for text in [record["text"] for record in records[:20]] + ["never seen: 東京 🙂\r\n\t\x00"]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    indented = "        return self\n"
    assert len(tokenizer.tokenize(indented)) <= 5
