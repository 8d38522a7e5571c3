"""tools/train_tokenizer.py and the quickstart's corpus, as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_zpp.data.text.tokenizers import build_tokenizer

ROOT = Path(__file__).parents[2]


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_tokenizer_trained_on_the_quickstarts_corpus_keeps_source_code(tmp_path):
    corpus, model = tmp_path / "corpus.jsonl", tmp_path / "t.model"
    for output in (corpus, tmp_path / "again.jsonl"):
        process = run("examples/quickstart/make_corpus.py", "--output", output, "--max-megabytes", 1)
        assert process.returncode == 0, process.stderr
    assert corpus.read_bytes() == (tmp_path / "again.jsonl").read_bytes()

    process = run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 1000, "--output", model)
    assert process.returncode == 0, process.stderr
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    assert tokenizer.vocab_size == 1000
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert len({record["path"] for record in records}) == len(records) > 20
    assert 0.9e6 < sum(len(record["text"].encode()) for record in records) < 2e6
    for text in [record["text"] for record in records[:20]] + ["never seen: 東京 🙂\r\n\t\x00"]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    indented = "        return self\n"
    assert len(tokenizer.tokenize(indented)) <= 5


def test_bad_input_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    process = run("tools/train_tokenizer.py", "--input", tmp_path / "in.jsonl", "--vocab-size", 1000, "--output", "t")
    assert process.returncode == 1
    assert process.stderr == f"error: {tmp_path}/in.jsonl:2: no key 'text'; it has 'title'\n"
    process = run("tools/train_tokenizer.py", "--input", tmp_path / "in.jsonl", "--vocab-size", 1000)
    assert process.returncode == 2 and "required: --output" in process.stderr
