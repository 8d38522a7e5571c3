"""What generate() goes by is kept where it lies beside the tokenizer, and made of the tokenizer's tokens elsewhere."""

from __future__ import annotations

import json

import pytest

from megatron_zpp.convert.hf.files import generation_settings

TOKENS = {"bos_token_id": 3, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("theirs", "ends"),
    [(2, 2), ([2], [2]), ([1, 2], [1, 2]), (1, [2, 1]), ([1], [2, 1]), (None, [2, 8])],
)
def test_our_end_of_documents_is_one_of_theirs(tmp_path, theirs, ends):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 9, "eos_token_id": 8, "hidden_size": 4}))
    # config.json speaks where the other file does not.
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
    for text in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"generation_config.json is damaged"):
            generation_settings({"tokenizer_model": str(tmp_path)}, TOKENS)
