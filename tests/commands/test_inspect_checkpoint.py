"""tools/inspect_checkpoint.py on real checkpoints."""

import shutil

import pytest

from megatron_zpp.commands.inspect_checkpoint import main
from tests.ranks import run_ranks
from tests.tools import flip
from tests.training.small_run import flags, train_each


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    argv = flags(data, f"--save {folder} --save-interval 2 --zero-hpz-partition-size 1", length="--train-iters 4")
    run_ranks(2, train_each, {"": argv})
    return folder


def test_list_shows_every_checkpoint_also_an_incomplete_one(folder, capsys):
    (folder / "iter_0000009.incomplete").mkdir(exist_ok=True)
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iter_0000009.incomplete: incomplete"
    assert lines[1].startswith("iter_0000004 (latest): gpt, 2 ranks") and "1,024 tokens, loss " in lines[1]
    assert lines[2].startswith("iter_0000002: gpt, 2 ranks")


def test_verify_names_the_damaged_file(folder, tmp_path, capsys):
    assert main(["verify", str(folder)]) == 0
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "iter_0000002" / "rank_00001.safetensors"
    flip(file, -9)
    capsys.readouterr()
    assert main(["verify", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "iter_0000004: good" in out and f"  {file} is not what was written: its SHA-256 differs" in out
    assert main(["verify", str(copy), "--ckpt-step", "4"]) == 0
    assert main(["verify", str(file.parent)]) == 1
    assert main(["verify", str(tmp_path)]) == 2


def test_diff_shows_what_differs_between_two_checkpoints(folder, tmp_path, capsys):
    first = str(folder / "iter_0000002")
    assert main(["diff", first, first]) == 0
    assert capsys.readouterr().out == "the same\n"
    assert main(["diff", first, str(folder)]) == 1
    out = capsys.readouterr().out
    assert "counters.iteration: 2 | 4" in out
    assert "model.layers.0.mlp.linear_fc1.weight: 4,096 of 4,096 elements differ, by up to 0.00" in out
    assert out.endswith(" tensors differ\n")
    assert main(["diff", first, str(tmp_path / "none")]) == 2
