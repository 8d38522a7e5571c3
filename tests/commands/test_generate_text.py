"""Text sampled from a checkpoint that a run saved."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron_zpp.commands import chat, generate_text
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megatron_zpp.families import ARCHITECTURES
from tests.ranks import run_ranks
from tests.tools import call, cut
from tests.training.small_run import train_each

ALPHABET = "abcdefghijklmnop"


def flags_of_alphabet(folder: Path) -> list[str]:
    """Return the flags of a GPT that sees nothing but the alphabet, over and over."""
    with IndexedDatasetWriter(str(folder / "data"), "<u2") as writer:
        writer.add_document([[*(ALPHABET * 400).encode(), 256]])
    return f"""--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 8
        --train-iters 60 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --split 1,0,0 --num-workers 0
        --log-interval 1000 --tokenizer-type ByteTokenizer --data-path {folder}/data
        --save {folder}/checkpoint --save-interval 60 --publish {folder}/weights --publish-interval 20""".split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    run_ranks(1, train_each, {"": flags_of_alphabet(folder)})
    return folder / "checkpoint"


@pytest.fixture
def sample(checkpoint):
    """Run the program: exit code, stdout and stderr."""

    def run(words: str, load: str | Path = checkpoint) -> tuple[int, str, str]:
        code, out, err = call(generate_text, "--load", load, *words.split())
        return code, out.removesuffix("\n"), err

    return run


def test_greedy_continues_the_alphabet(sample):
    found = sample("--prompt abcdefgh --num-tokens 40 --temperature 0")
    assert found == (0, (ALPHABET * 3)[:48], "")  # beyond the model's 32 positions too


def test_text_is_printed_as_it_is_written_and_a_character_that_is_cut_off_is_shown():
    """Each piece as soon as its characters are whole; "é" is two bytes."""
    tokenizer = ByteTokenizer()

    def stream(written: bytes, prompt: str = "") -> list[str]:
        ids = iter([[i] for i in written])
        return [*generate_text.stream(ids, tokenizer.tokenize(prompt), tokenizer.detokenize)]

    assert stream("né!".encode(), "été ") == ["été ", "n", "é", "!", ""]
    assert "".join(stream("é".encode()[:1])) == "\ufffd"


def test_several_texts_at_once(sample, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ijk\n")
    found = sample(f"--num-tokens 5 --temperature 0 --prompt abcdefgh --prompt cd --prompt-file {file}")
    assert found == (0, "== 1\nabcdefghijklm\n== 2\ncdefghi\n== 3\nijklmnop", "")


def test_a_chat_is_asked_by_its_template_and_remembers_what_was_said(checkpoint, sample, tmp_path, monkeypatch, capsys):
    """The template writes the alphabet around the message, and one of the end tokens ends the answer."""
    code, _, err = sample("--chat")
    assert code == 2 and "ByteTokenizer has no chat template: docs/tutorials/text-to-chat.md" in err

    hf = tmp_path / "hf"
    export_hf.export(export_hf.parse_arguments(["--load", str(checkpoint), "--output", str(hf)]), None)
    (hf / "chat_template.jinja").write_text(
        "{% for message in messages %}ab{{ message.content }}{% if add_generation_prompt %}gh{% endif %}{% endfor %}"
    )
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord("m"), 256]}))
    import_hf.import_(import_hf.parse_arguments(["--input", str(hf), "--save", str(tmp_path / "run")]), ARCHITECTURES)
    assert sample("--chat --prompt cdef --temperature 0", tmp_path / "run") == (0, "ijkl", "")

    format_chats, chats = HuggingFaceTokenizer.apply_chat_template, []

    def remember(tokenizer, given):
        chats.append([message["content"] for message in given[0]])
        return format_chats(tokenizer, given)

    monkeypatch.setattr(HuggingFaceTokenizer, "apply_chat_template", remember)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cdef\n\nb\xff\ncdef\n/new\ncdef\n"), "utf-8"))
    chat.main(["--load", str(tmp_path / "run"), "--temperature", "0", "--system", "ab"])
    out, err = capsys.readouterr()
    first, _, again, _ = out.splitlines()
    assert err == "error: 'b\\udcff' is not UTF-8 text\n"  # and the chat goes on
    assert first == again == "ijkl" and chats == [["ab", "cdef"], ["ab", "cdef", "ijkl", "cdef"], ["ab", "cdef"]]


def test_published_weights_write(checkpoint, tmp_path, capsys):
    words = ["--follow", str(checkpoint.parent / "weights"), "--prompt", "abcdefgh", "--num-tokens", "8"]
    pieces = generate_text.run(generate_text.parse_arguments([*words, "--temperature", "0"]))
    written = ""
    while not written.endswith("p\n"):  # then it waits for the next version
        written += next(pieces)
    assert written == f"== step 60\n{ALPHABET}\n"
    assert capsys.readouterr().err == f"waiting for weights in {checkpoint.parent / 'weights'}\n"


def test_errors_are_one_line(checkpoint, tmp_path, sample):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    for file in damaged.glob("iter_*/*.safetensors"):
        cut(file, 1000)
    for load, words, message in (
        ("nowhere", "", "nowhere holds no checkpoint"),
        (damaged, "", "rank_00000.safetensors has 1000 bytes instead of"),
        (checkpoint, "--ckpt-step 5", "iter_0000005 is not a complete checkpoint"),
    ):
        code, out, err = sample(words, load)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and message in err
