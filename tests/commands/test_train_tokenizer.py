"""tools/train_tokenizer.py and the quickstart's corpus, as a user starts them."""

import json

from megatron_zpp.data.text.tokenizers import build_tokenizer
from tests.tools import run


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


def test_bad_input_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    words = ("python", "tools/train_tokenizer.py", "--input", tmp_path / "in.jsonl", "--vocab-size", 1000)
    error = run(*words, "--output", "t", status=1).stderr
    assert error == f"error: {tmp_path}/in.jsonl:2: no key 'text'; it has 'title'\n"
    assert "required: --output" in run(*words, status=2).stderr
