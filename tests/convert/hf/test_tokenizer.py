"""transformers reads our tokenizers, and makes the ids that the model was trained on; generate() stops at our end."""

import argparse
import base64
import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from megatron_zpp.convert.hf.files import generation_settings
from megatron_zpp.convert.hf.tokenizer import build, build_kept, find_tokenizer, write_tokenizer
from megatron_zpp.data.text.description import describe_tokenizer
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from tests.data.small_data import BYTES, train_sentencepiece, write_ranks

SOURCE = Path(argparse.__file__).read_text()
OTHER = Path(json.decoder.__file__).read_text() + "  Ünïcödé 東京 👩‍🔬\r\n\t100 %"


def train_pieces(folder: Path, **options: object) -> dict[str, str]:
    model = train_sentencepiece(folder / "a.model", SOURCE.split("\n\n"), vocab_size=600, **options)
    return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": model}


def train_gpt2(folder: Path) -> dict[str, str]:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([SOURCE], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    vocabulary, merges = tokenizer.save_model(str(folder), "gpt2")
    return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocabulary, "merge_file": merges}


def train_huggingface(folder: Path) -> dict[str, str]:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([SOURCE], vocab_size=600, special_tokens=["<eos>"], show_progress=False)
    tokenizer.save(str(folder / "mine.json"))  # alone, without a tokenizer_config.json that names its eos_token
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "mine.json")}


def with_type(settings: dict[str, str], kind: str) -> dict[str, str]:
    return settings | {"tokenizer_type": kind}


def train_huggingface_with_bos(folder: Path, **flags: object) -> dict[str, object]:
    settings = train_huggingface(folder)
    tokenizer = Tokenizer.from_file(settings["tokenizer_model"])
    tokenizer.add_special_tokens(["<bos>"])
    begin = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    tokenizer.save(settings["tokenizer_model"])
    return settings | flags


def train_tiktoken(folder: Path) -> dict[str, object]:
    """Merge as tiktoken does, with words that no merges lead to, and the digits of a possessive pattern."""
    tokens = [*BYTES, b"12", b"th", b" t", b"the", b" the", b"  ", b"    ", b"def", b" unreachable", b"345"]
    model = write_ranks(folder / "a.tiktoken", tokens)
    return {"tokenizer_type": "TikTokenizer", "tokenizer_model": model, "tiktoken_pattern": "cl100k_base"}


def train_megatrons_tiktoken(folder: Path) -> dict[str, object]:
    tokens = [*BYTES, b"th", b"the", b" the", b"def"]
    entries = [{"rank": i, "token_bytes": base64.b64encode(x).decode(), "token_str": ""} for i, x in enumerate(tokens)]
    (folder / "v.json").write_text(json.dumps(entries))
    flags = {"vocab_size": len(tokens) + 1000, "tiktoken_pattern": "v2"}
    return {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(folder / "v.json")} | flags


KINDS = {
    "bpe": lambda folder: train_pieces(folder, add_dummy_prefix=False),  # as train_tokenizer
    "bpe-dummy-prefix": train_pieces,  # as Llama 2
    "unigram": lambda folder: train_pieces(folder, model_type="unigram"),
    "gpt2": train_gpt2,
    "huggingface": train_huggingface,
    "huggingface-bos": train_huggingface_with_bos,
    "huggingface-bos-off": lambda folder: train_huggingface_with_bos(
        folder, tokenizer_hf_no_include_special_tokens=True
    ),
    "llama2": lambda folder: with_type(train_pieces(folder), "Llama2Tokenizer"),
    "megatron": lambda folder: with_type(train_pieces(folder), "MegatronSentencePieceTokenizer"),
    "tiktoken": train_tiktoken,
    "megatrons-tiktoken": train_megatrons_tiktoken,
    "bytes": lambda folder: {"tokenizer_type": "ByteTokenizer"},
}


@pytest.mark.parametrize("train", KINDS.values(), ids=KINDS)
def test_ids_are_the_same_in_transformers(train, tmp_path):
    settings, folder = train(tmp_path), tmp_path / "hf"
    folder.mkdir()
    ours = build(settings)
    tokens = write_tokenizer(settings, ours, folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (SOURCE, OTHER):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.tokenize(text, add_special_tokens=False)
        assert theirs(text)["input_ids"] == ours.tokenize(text) == [*ours.special.prefix, *ids]
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eod == tokens["eos_token_id"]
    assert theirs.decode([ours.eod], skip_special_tokens=True) == ""
    if train is train_megatrons_tiktoken:  # the names that Megatron gives to ids that stand for no text
        names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<SPECIAL_7>"]
        assert theirs.convert_ids_to_tokens(range(8)) == names

    again = build(find_tokenizer(folder))  # as an import finds it
    assert (again.tokenize(OTHER), again.eod, again.vocab_size) == (ours.tokenize(OTHER), ours.eod, ours.vocab_size)


def test_a_tokenizer_that_comes_out_different_or_is_unknown_is_refused(tmp_path):
    settings = train_pieces(tmp_path, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match=r"this SentencePieceTokenizer cannot be written for trans.*--no-token"):
        write_tokenizer(settings, build(settings), tmp_path / "hf")
    with pytest.raises(ValueError, match="a NewTokenizer cannot be written for transformers: export the weights alone"):
        write_tokenizer({"tokenizer_type": "NewTokenizer"}, ByteTokenizer(), tmp_path)


def test_a_checkpoint_is_not_used_with_a_tokenizer_that_it_was_not_trained_with(tmp_path, capsys):
    plain, llama2 = train_pieces(tmp_path), with_type(train_pieces(tmp_path), "Llama2Tokenizer")
    meta = {"tokenizer": describe_tokenizer("Llama2Tokenizer", build(llama2))}
    assert build_kept(llama2, tmp_path, meta).eod == build(llama2).eod
    message = r"was made with another tokenizer, Llama2Tokenizer, 600 ids.*texts begin with \[1\], here nothing"
    with pytest.raises(ValueError, match=message):
        build_kept(plain, tmp_path, meta)
    build_kept(plain, tmp_path, {})
    assert capsys.readouterr().err == ""  # nothing is assumed
    build_kept(llama2, tmp_path, {})  # saved by an earlier version
    assert "does not say how its texts were tokenized; assuming Llama2Tokenizer" in capsys.readouterr().err


TOKENS = {"bos_token_id": 3, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("theirs", "ends"), [(2, 2), ([2], [2]), ([1, 2], [1, 2]), (1, [2, 1]), ([1], [2, 1]), (None, [2, 8])]
)
def test_our_end_of_documents_is_one_of_theirs(tmp_path, theirs, ends):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 9, "eos_token_id": 8, "hidden_size": 4}))
    generation = {"temperature": 0.5} | ({} if theirs is None else {"eos_token_id": theirs})
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        special, kept = generation_settings({"tokenizer_model": str(path)}, TOKENS)
        assert special == {"bos_token_id": 9, "eos_token_id": ends}
        assert kept == {"bos_token_id": 3, "eos_token_id": ends, "temperature": 0.5}
    assert generation_settings({"vocab_file": str(tmp_path / "vocab.json")}, TOKENS) == (special, kept)


def test_without_such_a_model_the_tokenizers_tokens_count(tmp_path):
    for settings in ({}, {"tokenizer_model": str(tmp_path / "a.model")}, {"vocab_file": None}):
        assert generation_settings(settings, TOKENS) == (TOKENS, TOKENS)
    assert generation_settings({"tokenizer_model": str(tmp_path)}, {}) == ({}, {})


def test_a_damaged_file_is_named(tmp_path):
    for text, wrong in (("{", "is not JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"generation_config.json {wrong}"):
            generation_settings({"tokenizer_model": str(tmp_path)}, TOKENS)
