"""A run and its resumption with wandb itself, offline: one run there, which says what was run."""

import os

import pytest

from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, flags, write_text


def offline(*argvs: list[str]):
    os.environ["WANDB_MODE"] = "offline"
    return call_pretrain(*argvs)


def test_a_run_that_resumes_is_one_run_of_wandb(tmp_path):
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    save = tmp_path / "run"
    argv = flags(write_text(tmp_path), f"--wandb-project p --save {save} --save-interval 2", length="--train-iters 4")
    codes = run_ranks(1, offline, [*argv, "--exit-interval", "2"], [*argv, "--load", str(save)])[0]
    assert [code for code, _, _ in codes] == [0, 0], codes
    files = [*(save / "wandb").glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 2 and len({file.name for file in files}) == 1  # by the run's id
    for file in files:
        content = file.read_bytes()
        for word in (b"num_parameters", b"command", b"commit", b"torch_version", b"python_version", b"hidden_size"):
            assert word in content, word


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    argv = flags(write_text(tmp_path), "--wandb-project p --wandb-save-dir /dev/full/x")
    ((code, _, err),) = run_ranks(1, offline, argv)[0]
    assert code == 0 and err.count("warning: wandb's run in /dev/full/x cannot be written") == 1, err
