"""--dry-run: what a command asks for and needs, for any number of ranks, from one process that starts nothing."""

import re
import shlex
import sys

import pytest

from megatron_zpp.commands import estimate, pretrain
from megatron_zpp.families import GPT
from tests.training.small_run import ended, torchrun

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
COMMAND = SHAPE + "--train-iters 10 --bf16 --global-batch-size 2048"
NO_FILES = "--data-path nowhere/text_document --vocab-file nowhere/vocab.json --merge-file nowhere/merges.txt"
FAKE = "--mock-data --vocab-size 1000"


@pytest.fixture
def dry_run(monkeypatch, capsys, tmp_path):
    """The status and the output of the program with --dry-run, where nothing may be started."""

    def must_not_start(*arguments) -> None:
        raise AssertionError("started")

    def run(words: str, **environment: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *shlex.split(words), "--dry-run"])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        try:
            pretrain.pretrain(GPT)
        except SystemExit as exit_:
            return int(exit_.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    for started in ("start_local_ranks", "distributed.init_distributed", "build_trainer"):
        monkeypatch.setattr(f"megatron_zpp.commands.pretrain.{started}", must_not_start)
    return run


def test_512_ranks_need_what_the_estimate_says(dry_run, tmp_path):
    words = f"{COMMAND} {FAKE} --zero-quantized-weights --zero-quantized-gradients"
    status, out, err = dry_run(words, WORLD_SIZE="512", LOCAL_WORLD_SIZE="16")
    assert (status, err) == (0, "")
    assert "gpt, ZeRO stage 3, 512 rank(s) on 32 node(s) (LOCAL_WORLD_SIZE of the launcher)" in out
    cluster = "--nodes 32 --ranks-per-node 16 --vocabulary 1000 pretrain_gpt.py"
    time = estimate.run(estimate.parse_arguments([*cluster.split(), *words.split()]))
    found = time.needs
    assert f"{found.memory / 1e9:9.3g}  in all" in out
    assert f"{found.sent_between_nodes['gradients'] / 32 / 1e9:9.3g}  gradients" in out
    assert f"{found.sent_per_node / found.parameters:9.3g}  bytes for each parameter" in out
    assert "655,360 tokens in 10 steps, the last of 2 micro-batch(es) a rank" in out
    assert not [*tmp_path.iterdir()]


def test_settings_and_notes_are_all_there(dry_run):
    words = f"{COMMAND} {FAKE} --no-rope-fusion --save-interval 5 --zero-hpz-partition-size 4 --rotary-base 10000"
    _, out, _ = dry_run(words, WORLD_SIZE="8")
    settings = re.search(r"^settings .*\n((?:  --.*\n)+)", out, re.MULTILINE)
    assert settings is not None
    derived = """--max-position-embeddings 32 --position-embedding-type learned_absolute --normalization LayerNorm
        --attention-dropout 0.1 --hidden-dropout 0.1 --tie-embeddings-and-output-weights --ffn-hidden-size 256
        --kv-channels 16 --accumulate-allreduce-grads-in-fp32 --tokenizer-type NullTokenizer"""
    typed = f"{COMMAND} {FAKE} --save-interval 5 --zero-hpz-partition-size 4".replace("1e-3", "0.001")
    expected = {f"--{flag.strip()}" for flag in f"{typed} {derived}".split("--")[1:]}
    assert {line.strip() for line in settings[1].splitlines()} == expected
    assert "note: --save-interval has no effect without --save\n" in out
    assert "note: --no-rope-fusion is accepted but needs no setting: " in out


def test_files_may_be_missing(dry_run):
    status, out, _ = dry_run(f"{COMMAND} {NO_FILES} --dry-run-world-size 64")
    assert status == 0 and "not estimated without --vocab-size: " in out and "nowhere/vocab.json" in out
    status, out, _ = dry_run(f"{COMMAND} {NO_FILES} --dry-run-world-size 64 --vocab-size 50257")
    assert status == 0 and "64 rank(s) on 8 node(s) (8 a node, unless " in out
    assert "  in all\n" in out


def test_what_is_not_estimated_is_said(dry_run):
    # 4 layers of 12 * 64 * 64 weights and 13 * 64 biases and norms, the last norm, 32 positions, 1024 tokens
    parameters = 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64 + 32 * 64 + 1024 * 64
    status, out, _ = dry_run(f"{COMMAND} {FAKE} --zero-stage 0 --dry-run-world-size 16")
    assert status == 0 and f"{parameters:,} parameters\n" in out
    assert f"the first rank keeps {16 * parameters / 1e9:.3g} GB of parameters, gradients and optimizer" in out
    assert "not estimated: --zero-stage 0" in out


def test_local_ranks_are_planned_and_none_is_started(dry_run):
    words = f"{SHAPE} --train-iters 10 --global-batch-size 32 {FAKE} --local-ranks 16 --local-nodes 2 --zeropp int8"
    status, out, _ = dry_run(words)
    assert status == 0 and "16 rank(s) on 2 node(s) (--local-ranks)\n16 data-parallel rank(s)" in out
    assert "--zero-hpz-partition-size 8" in out and "nothing was started" in out


def test_of_a_pipeline_the_rank_that_needs_most_is_shown(dry_run):
    words = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --dry-run-world-size 16"
    status, out, _ = dry_run(f"{COMMAND} {FAKE} {words}")
    assert status == 0 and "memory of a GPU of pipeline rank 0, the largest, GB" in out and "hidden states\n" in out


def test_a_launcher_s_node_must_divide_the_ranks(dry_run):
    status, _, err = dry_run(f"{COMMAND} {FAKE} --dry-run-world-size 4", WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
    assert status == 2 and "LOCAL_WORLD_SIZE 8 does not divide 4 ranks" in err


def test_the_number_of_ranks_needs_its_switch():
    _, err = ended(torchrun(0, shlex.split(f"{COMMAND} {FAKE} --dry-run-world-size 4")), status=2)
    assert err == "error: --dry-run-world-size needs --dry-run\n"


def test_a_dry_run_under_torchrun_speaks_once():
    out, _ = ended(torchrun(2, shlex.split(f"{COMMAND} {FAKE} --dry-run")))
    assert out.count("nothing was started") == 1 and "2 rank(s) on 1 node(s)" in out
