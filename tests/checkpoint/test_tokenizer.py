"""A checkpoint keeps its tokenizer; programs read it there, and follow no path that a checkpoint names."""

import os

import pytest

from megatron_zpp.checkpoint import CheckpointError, problems, read_meta
from megatron_zpp.checkpoint.tokenizer import check_tokenizer, settings_with_tokenizer
from megatron_zpp.commands.convert import export_hf
from tests.checkpoint.saved import meta_of, rewrite, save

SECRET = "of this machine's user alone"


def save_with(folder, **tokenizer):
    return save(folder, 1, settings=meta_of(1)["settings"] | tokenizer)


def test_a_sentencepiece_model_and_what_lies_beside_it_are_kept(tmp_path):
    (tmp_path / "my.model").write_text("pieces")
    (tmp_path / "generation_config.json").write_text("{}")
    kinds = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(tmp_path / "my.model")}
    checkpoint = save_with(tmp_path / "save", **kinds)
    os.unlink(tmp_path / "my.model")
    assert problems(checkpoint) == []
    settings = settings_with_tokenizer(checkpoint, read_meta(checkpoint))
    assert settings["tokenizer_model"] == str(checkpoint / "tokenizer.model")
    assert (checkpoint / "tokenizer.model").read_text() == "pieces"
    assert (checkpoint / "generation_config.json").exists()
    (checkpoint / "tokenizer.model").write_text("other.")
    assert "tokenizer.model" in problems(checkpoint)[0]


def test_another_file_of_the_same_size_is_refused(tmp_path):
    (tmp_path / "my.model").write_text("pieces")
    (tmp_path / "config.json").write_text("{}")
    kinds = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(tmp_path / "my.model")}
    files = read_meta(save_with(tmp_path / "save", **kinds))["files"]
    (tmp_path / "config.json").write_text("[]")  # makes no tokens
    check_tokenizer(kinds, files)
    (tmp_path / "my.model").write_text("PIECES")
    with pytest.raises(CheckpointError, match="is not the file of the checkpoint's tokenizer"):
        check_tokenizer(kinds, files)
    check_tokenizer(kinds, {})  # an older checkpoint keeps none


def test_vocabulary_and_merges_are_kept(tmp_path):
    for name in ("v.json", "m.txt"):
        (tmp_path / name).write_text(name)
    files = {"vocab_file": str(tmp_path / "v.json"), "merge_file": str(tmp_path / "m.txt")}
    checkpoint = save_with(tmp_path / "save", tokenizer_type="GPT2BPETokenizer", **files)
    settings = settings_with_tokenizer(checkpoint, read_meta(checkpoint))
    assert settings["vocab_file"] == str(checkpoint / "vocab.json") and settings["tokenizer_model"] is None
    assert (checkpoint / "merges.txt").read_text() == "m.txt"


def test_a_path_in_a_foreign_checkpoint_is_not_followed(tmp_path):
    """It was resealed to name a file of ours, which an export then copied for its author."""
    (tmp_path / "secret").write_text(SECRET)
    checkpoint = save(tmp_path / "save", 1)
    kinds = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(tmp_path / "secret")}
    rewrite(checkpoint, "meta.json", lambda meta: meta["settings"].update(kinds))
    assert settings_with_tokenizer(checkpoint, read_meta(checkpoint))["tokenizer_model"] is None
    argv = ["--load", str(tmp_path / "save"), "--output", str(tmp_path / "out")]
    with pytest.raises((ValueError, OSError), match="--tokenizer-model"):
        export_hf.export(export_hf.parse_arguments(argv))
    copied = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    assert copied == [tmp_path / "secret"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_or_a_file_that_is_not_sealed_is_refused(tmp_path, name):
    (tmp_path / "secret").write_text(SECRET)
    checkpoint = save(tmp_path / "save", 1)
    (checkpoint / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name} is not a file of the checkpoint: remove it"):
        settings_with_tokenizer(checkpoint, read_meta(checkpoint))
    meta = read_meta(checkpoint)
    meta["files"][name] = {"bytes": len(SECRET), "sha256": "0" * 64}
    with pytest.raises(CheckpointError, match="link"):
        settings_with_tokenizer(checkpoint, meta)
