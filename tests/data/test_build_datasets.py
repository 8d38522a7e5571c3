"""From flags to datasets: splits, blends, checks."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_zpp.data.build import MOCK, build_datasets, check_end_of_document
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.index_cache import no_progress
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.source import DataRequest
from megatron_zpp.data.text.description import describe_tokenizer
from megatron_zpp.data.text.tokenizers import NullTokenizer, build_tokenizer
from megatron_zpp.data.text_stream import STREAM
from tests.data.small_data import A, B, train_sentencepiece, write


@pytest.fixture
def build(tmp_path):
    def build(**flags):
        options = SampleOptions(**({"seq_length": 128, "seed": 1234} | flags.pop("options", {})))
        default = {"num_samples": (100, 5, 1), "vocab_size": 257, "cache_path": str(tmp_path / "cache")}
        return build_datasets(options, **(default | flags))

    return build


def test_nothing_is_built_of_what_is_not_asked_for(build):
    assert build(data_path=[A], split="90,10", num_samples=(100, 5, 1)).test is None
    assert build(data_path=[A], num_samples=(100, 0, 0))[1:] == (None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data_path": [A + "x"]}, r"ax\.idx does not exist"),
        ({"data_path": [A], "split": "0,1,1"}, "no training data"),
        ({"data_path": [A], "split": "1000,1", "num_samples": (9, 9, 0)}, "the valid split .* is empty"),
        ({"data_path": [A], "vocab_size": 256}, r"a\.bin holds token 256, but the vocabulary has 256"),
        ({"data_path": [A], "options": {"eod": 12345, "reset_position_ids": True}}, "no document .* ends with 12345, "),
        ({"data_path": [A, B], "split": "1", "num_samples": (400, 0, 0)}, "352 samples in the train split, but the"),
        ({"data_path": ["1", A, "1", B], "num_samples": (None, 0, 0)}, "a blend by weights has no epochs"),
    ],
)
def test_bad_input_is_named(build, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build(**flags)


@pytest.mark.parametrize("path", [["{x}"], ["1", "{x}", "3", A]])
def test_a_small_corpus_trains_without_the_evaluations_that_the_default_split_leaves_empty(build, tmp_path, path):
    write(tmp_path / "x", [[[1] * 300]] * 12)
    flags = {"data_path": [word.format(x=tmp_path / "x") for word in path], "options": {"seq_length": 64}}
    notes: list[str] = []
    train, *evaluated = build(**flags, note=notes.append)
    assert len(train) >= 100 and evaluated == [None, None]
    none = f"the test split of {tmp_path}/x is empty (0 of 12 documents): give a larger share with --split"
    assert len(notes) == 2 and notes[1].startswith(
        f"nothing is evaluated on test data: by the default of --split, {none}"
    )
    for asked in ({"split": "969,30,1"}, {"options": {"seq_length": 4000}}):
        with pytest.raises(ValueError, match=r"the (valid|train) split of "):
            build(**flags | asked, note=notes.append)
    with pytest.raises(ValueError, match=r"the valid split of .* holds 300 tokens, less than 301"):
        write(tmp_path / "y", [[[1] * 300]])
        build(
            train_data_path=[A], valid_data_path=[str(tmp_path / "y")], options={"seq_length": 301}, note=notes.append
        )
    assert len(notes) == 2


def test_ids_are_checked_against_the_vocabulary_again_when_data_is_rewritten(build, tmp_path):
    flags = {"data_path": [str(tmp_path / "x")], "split": "1", "num_samples": (7, 0, 0)}
    for token, dtype, vocab_size, message in (
        (256, "<i4", 257, None),
        (300, "<i4", 257, "holds token 300"),
        (-1, "<i4", 257, "holds token -1"),
        (float("inf"), "<f4", 257, r"x\.bin holds float32 numbers, not token ids"),
        (255, "u1", 256, None),  # a vocabulary that holds all numbers of the type
        (255, "u1", 255, "holds token 255, but the vocabulary has 255"),
    ):
        write(tmp_path / "x", [[[1] * 1000 + [token]]], dtype)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            build(**flags, vocab_size=vocab_size)


def test_the_end_of_documents_is_looked_for_in_those_that_hold_any_token(tmp_path):
    indexed = IndexedDataset(write(tmp_path / "x", ([], [[]], [[1, 9]], [[9, 1], [2, 9]], [[3]], [])))
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        for eod in (9, 3):  # one document is enough
            check_end_of_document(indexed, SampleOptions(8, 1, eod=eod, **{name: True}))
        for eod in (1, 2, 4):
            with pytest.raises(ValueError, match=f"no document of .* ends with {eod}, "):
                check_end_of_document(indexed, SampleOptions(8, 1, eod=eod, **{name: True}))
    check_end_of_document(indexed, SampleOptions(8, 1, eod=4))  # nothing looks for it


def test_mock_data_is_the_same_everywhere_and_differs_by_sample():
    options, tokenizer = SampleOptions(seq_length=128, seed=1234), NullTokenizer(49)
    request = DataRequest(None, options, (100, 5, 0), tokenizer, {}, no_progress, print)
    first, second = MOCK.open(request), MOCK.open(request)
    assert len(first.valid) == 5 and first.test is None
    assert np.array_equal(first.train[3], second.train[3])
    assert len(first.train[3]) == 129
    assert not np.array_equal(first.train[3], first.train[4])
    assert not np.array_equal(first.train[3], first.valid[3])
    assert first.train[3].max() < 50


def test_streaming_without_its_package_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    flags = SimpleNamespace(hf_dataset=("x",), split=None)
    request = DataRequest(
        flags, SampleOptions(seq_length=8, seed=1), (1, 0, 0), NullTokenizer(9), {}, no_progress, print
    )
    with pytest.raises(ImportError, match=r"--hf-dataset needs the package datasets: .* megatron_zpp's extra stream$"):
        STREAM.open(request)


def test_data_of_a_tokenizer_that_treats_texts_otherwise_are_refused_by_name(tmp_path):
    model = train_sentencepiece(tmp_path / "t.model", ["a text of words", "another text"] * 50, vocab_size=280)
    made = {}
    for kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer", "MegatronSentencePieceTokenizer"):
        tokenizer = build_tokenizer(kind, model)
        made[kind] = describe_tokenizer(kind, tokenizer)
        with IndexedDatasetWriter(tmp_path / kind, "<u2", tokenizer=made[kind]) as writer:
            for _ in range(60):
                writer.add_document([[*tokenizer.tokenize("a text of words"), tokenizer.eod]])

    def build(made_with: str, used: str, notes: list[str]):
        options = SampleOptions(seq_length=4, seed=1)
        flags = {"data_path": [str(tmp_path / made_with)], "split": "1", "num_samples": (10, 0, 0)}
        tokenizer = made[used]
        return build_datasets(
            options, **flags, vocab_size=tokenizer["vocab_size"], tokenizer=tokenizer, note=notes.append
        )

    notes: list[str] = []
    assert len(build("Llama2Tokenizer", "Llama2Tokenizer", notes).train) >= 10 and not notes
    for made_with, used, message in (
        (
            "Llama2Tokenizer",
            "GPTSentencePieceTokenizer",
            r"made with another tokenizer, Llama2.*begin with \[1\], here noth",
        ),
        ("GPTSentencePieceTokenizer", "MegatronSentencePieceTokenizer", "the end of a document is 2, here 282"),
        (
            "MegatronSentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "holds token 282, but the vocabulary has 280: .* before February 2026 is MegatronSentencePieceTokenizer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(made_with, used, notes)

    # A dataset that does not say, such as Megatron's: it is read, and a note says what is assumed.
    (tmp_path / "Llama2Tokenizer.tokenizer.json").unlink()
    build("Llama2Tokenizer", "Llama2Tokenizer", notes)
    assert len(notes) == 1 and "Llama2Tokenizer has no .tokenizer.json: assuming texts as this run's" in notes[0]
    (tmp_path / "Llama2Tokenizer.tokenizer.json").write_text('{"type": "Llama2Tokenizer"}')
    with pytest.raises(ValueError, match=r"Llama2Tokenizer.tokenizer.json is damaged .*lacks vocab_size, eod"):
        build("Llama2Tokenizer", "Llama2Tokenizer", notes)
