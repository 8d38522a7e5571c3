"""Text sampled from a checkpoint that two ranks saved."""

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.models.decoder import Decoder
from megatron_zpp.tools import generate_text
from megatron_zpp.training.pretrain import train
from tests.models.configs import gpt_config
from tests.ranks import run_ranks
from tests.training.small_run import start

ALPHABET = "abcdefghijklmnop"


def train_on_alphabet(folder: str) -> None:
    """A GPT that has seen nothing but the alphabet, over and over. For ``run_ranks``."""
    argv = f"""--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4
        --train-iters 60 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --split 1,0,0 --num-workers 0
        --log-interval 1000 --tokenizer-type ByteTokenizer --data-path {folder}/data
        --save {folder}/checkpoint --save-interval 60"""
    run, _ = start(argv.split())
    train(run, time.monotonic())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    with IndexedDatasetWriter(str(folder / "data"), "<u2") as writer:
        writer.add_document([[*(ALPHABET * 400).encode(), 256]])
    run_ranks(2, train_on_alphabet, str(folder))
    return folder / "checkpoint"


@pytest.fixture
def sample(monkeypatch, capsys):
    """Run the program: exit code, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate_text.py", *argv])
        code = generate_text.main()
        out, err = capsys.readouterr()
        return code, out.removesuffix("\n"), err

    return run


def test_greedy_continues_what_was_learned(checkpoint, sample):
    code, text, err = sample(
        "--load", str(checkpoint), "--prompt", "abcdefgh", "--num-tokens", "40", "--temperature", "0"
    )
    assert (code, err) == (0, "")
    assert text == (ALPHABET * 3)[:48]  # beyond the model's 32 positions too


def test_seed_decides_the_text_and_one_candidate_is_greedy(checkpoint, sample):
    base = ["--load", str(checkpoint), "--prompt", "p", "--num-tokens", "20"]
    texts = [sample(*base, "--temperature", "9", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    only = sample(*base, "--temperature", "9", "--top-k", "1")[1]
    assert only == sample(*base, "--temperature", "0")[1]


def constant_model(likeliest: list[int], vocab_size: int) -> Decoder:
    """A GPT whose logits are 9 for ``likeliest``, 8 for id 0 and 0 else, whatever it reads."""
    model = Decoder(gpt_config(1, 4, 1, vocab_size, 8)).eval()
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.copy_(torch.tensor([1.0, 0, 0, 0]))
        model.word_embeddings.weight.zero_()
        model.word_embeddings.weight[0, 0] = 8
        model.word_embeddings.weight[likeliest, 0] = 9
    return model


def test_padding_of_the_vocabulary_is_never_drawn():
    model = constant_model([10, 11], vocab_size=12)
    ids = generate_text.generate(model, [1], 3, vocab_size=10, context_length=8, eod=9, temperature=0)
    assert ids == [0, 0, 0]


def test_text_ends_with_the_document():
    model = constant_model([7], vocab_size=12)
    ids = generate_text.generate(model, [1], 5, vocab_size=12, context_length=8, eod=7, temperature=0)
    assert ids == [7]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load", "nowhere"], "nowhere holds no checkpoint"),
        (["--load", "damaged"], "rank_00000.safetensors has 1000 bytes instead of"),
        (["--load", "checkpoint", "--ckpt-step", "5"], "iter_0000005 is not a complete checkpoint"),
    ],
)
def test_errors_are_one_line(checkpoint, tmp_path, monkeypatch, sample, argv, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "checkpoint")
    shutil.copytree(checkpoint, "damaged")
    for file in Path("damaged").glob("iter_*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    code, out, err = sample(*argv)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
