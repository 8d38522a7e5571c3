"""tools/preprocess_data.py as a user starts it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zpp.data.indexed_dataset import IndexedDataset

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/data/golden/golden.json").read_text())["datasets"]
WORDS = (  # noqa: SIM905
    "alpha beta gamma delta river stone seven eight a an the of to and größe naïve 東京 zero-shot loss mask token ."
).split()


def preprocess(folder, lines, *arguments):
    """Runs the tool on ``lines``; returns the process. Output prefix: folder/out."""
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(folder / "in.jsonl"), *arguments]
    command += ["--output-prefix", str(folder / "out"), "--tokenizer-type", "ByteTokenizer"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def documents(prefix):
    """Texts of each document's sequences, the end-of-document id as a bar."""
    dataset = IndexedDataset(prefix)
    texts = ["".join("|" if i == 256 else chr(i) for i in dataset[s]) for s in range(len(dataset))]
    ends = dataset.document_indices
    return [texts[ends[d] : ends[d + 1]] for d in range(dataset.num_documents)]


def golden_corpus(num_documents, x):
    """The corpus from which Megatron's own tool made tests/data/golden."""

    def advance():
        nonlocal x
        x = (1103515245 * x + 12345) % 2**31
        return x >> 16

    for document in range(num_documents):
        drawn = advance()
        num_words = 400 if document == 7 else 1 + drawn % 60
        yield " ".join(WORDS[advance() % 22] for _ in range(num_words))


@pytest.mark.parametrize(("name", "num_documents", "start", "workers"), [("a", 200, 1, 2), ("b", 60, 2, 1)])
def test_output_equals_megatrons_to_the_byte(tmp_path, name, num_documents, start, workers):
    texts = list(golden_corpus(num_documents, start))
    assert hashlib.sha256("".join(f"{t}\n" for t in texts).encode()).hexdigest() == GOLDEN[name]["text_sha256"]
    lines = [json.dumps({"text": text}) for text in texts]
    process = preprocess(tmp_path, lines, "--append-eod", "--workers", str(workers))
    assert process.returncode == 0, process.stderr
    for suffix in ("bin", "idx"):
        digest = hashlib.sha256((tmp_path / f"out_text_document.{suffix}").read_bytes()).hexdigest()
        assert digest == GOLDEN[name][f"{suffix}_sha256"]


def test_many_batches_by_many_workers_keep_their_order(tmp_path):
    texts = [f"{i} " + "x" * 3000 for i in range(400)]  # five batches
    process = preprocess(tmp_path, [json.dumps({"text": text}) for text in texts], "--workers", "3")
    assert process.returncode == 0, process.stderr
    assert documents(tmp_path / "out_text_document") == [[text] for text in texts]


def test_keys_lists_and_empty_texts(tmp_path):
    lines = ['{"text": ["ab", "", "c"], "title": "T"}', "", '{"text": "", "title": "U"}', '{"text": "d", "title": "V"}']
    process = preprocess(tmp_path, lines, "--json-keys", "text", "title", "--append-eod")
    assert process.returncode == 0, process.stderr
    assert documents(tmp_path / "out_text_document") == [["ab", "c|"], [], ["d|"]]
    assert documents(tmp_path / "out_title_document") == [["T|"], ["U|"], ["V|"]]


BAD_LINES = ["{", "[1]", '{"other": "x"}', '{"text": 3}', '{"text": ["x", 3]}', '{"text": "\\ud800"}']


def test_bad_lines_can_be_skipped(tmp_path):
    process = preprocess(tmp_path, ['{"text": "a"}', *BAD_LINES, '{"text": "b"}'], "--skip-bad-lines")
    assert process.returncode == 0, process.stderr
    assert f"2 documents, 2 tokens in {tmp_path}/out_text_document.bin; 6 bad lines skipped" in process.stdout
    assert documents(tmp_path / "out_text_document") == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("line", "message"), [(BAD_LINES[0], "Expecting"), (BAD_LINES[2], "no key 'text'; it has 'other'")]
)
def test_a_bad_line_ends_the_job_and_leaves_no_file(tmp_path, line, message):
    process = preprocess(tmp_path, ['{"text": "a"}', "", line])
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert f"error: {tmp_path}/in.jsonl:3: {message}" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_input_without_text_is_an_error(tmp_path):
    process = preprocess(tmp_path, ['{"text": ""}'])
    assert process.returncode == 1
    assert "holds no text under 'text'" in process.stderr
