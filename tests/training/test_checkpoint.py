"""Saving and resuming: the same curve, other numbers of ranks, and checkpoints that are none."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from pathlib import Path

import pytest

from megatron_zpp.training.pretrain import train
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, Metrics, call_pretrain, flags, start, train_each, write_text

CURVES = ("lm loss", "grad-norm", "learning-rate", "lm loss validation", "batch-size")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    """Saved by 4 ranks after 4 of 8 steps, without dropout."""
    folder = tmp_path_factory.mktemp("checkpoint")
    argv = flags(data, NO_DROPOUT, f"--save {folder} --save-interval 4 --exit-interval 4")
    run_ranks(4, train_each, {"": argv})
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data) -> Metrics:
    return run_ranks(1, train_each, {"": flags(data, NO_DROPOUT)})[0][""]


def _train(argv: list[str]) -> tuple[str, Metrics]:
    """What a run printed, and its metrics."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run, metrics = start(argv)
        train(run, time.monotonic())
    return out.getvalue(), metrics


EVERYTHING = (
    "--zero-hpz-partition-size 2 --zero-quantized-weights --zero-weight-difference-bits 4 "
    "--zero-quantized-gradients --zero-gradient-rounding stochastic --zeropp-loco --zeropp-loco-hops both"
)


@pytest.mark.parametrize(
    "world_size, more",
    [
        (4, EVERYTHING),
        (2, "--zero-stage 1 --rampup-batch-size 2 2 24"),
        (2, "--zero-stage 2 --fp16 --loss-scale-window 2 --initial-loss-scale 65536 --optimizer sgd"),
    ],
)
def test_resumes_bit_for_bit_and_again(data, tmp_path, world_size, more):
    argv = flags(data, more, "--eval-interval 2")  # with dropout and accumulation
    expected = run_ranks(world_size, train_each, {"": argv})
    parts = [*argv, *f"--save {tmp_path} --load {tmp_path} --save-interval 3 --exit-interval 3".split()]
    resumed = [run_ranks(world_size, train_each, {"": parts}) for _ in range(3)]
    for rank, metrics in enumerate(expected):
        for curve in CURVES:
            joined = [value for part in resumed for value in part[rank][""].get(curve, [])]
            assert joined == metrics[""][curve], curve


@pytest.mark.parametrize("world_size, stage", [(1, 3), (2, 1), (2, 0)])
def test_resumes_on_other_ranks_and_stages(data, checkpoint, uninterrupted, world_size, stage):
    argv = flags(data, NO_DROPOUT, f"--load {checkpoint} --zero-stage {stage}")
    out, metrics = run_ranks(world_size, _train, argv)[0]
    assert metrics["lm loss"] == pytest.approx(uninterrupted["lm loss"][4:], rel=1e-5)
    assert metrics["lm loss validation"] == pytest.approx(uninterrupted["lm loss validation"], rel=1e-5)
    assert f"note: random states start anew: 4 ranks saved, {world_size} load" in out


def test_loads_less_and_changes_the_plan(data, checkpoint, uninterrupted):
    load = f"--load {checkpoint} --override-opt_param-scheduler"
    out, finetuned = run_ranks(1, _train, flags(data, NO_DROPOUT, load, "--finetune --train-iters 2"))[0]
    assert "iteration        1/       2 | consumed samples:            8 |" in out
    assert finetuned["lm loss"][0] < uninterrupted["lm loss"][0] - 0.2

    out, fresh_optimizer = run_ranks(1, _train, flags(data, NO_DROPOUT, load, "--no-load-optim"))[0]
    assert "iteration        5/       8 | consumed samples:           40 |" in out
    assert fresh_optimizer["lm loss"][0] == pytest.approx(uninterrupted["lm loss"][4], rel=1e-5)
    assert fresh_optimizer["lm loss"][2] != pytest.approx(uninterrupted["lm loss"][6], rel=1e-5)

    # More samples than the first plan had, and more evaluations.
    plan = "--global-batch-size 16 --train-iters 12 --eval-interval 1 --eval-iters 3"
    out, _ = run_ranks(1, _train, flags(data, NO_DROPOUT, load, plan))[0]
    assert "iteration       12/      12 | consumed samples:          160 |" in out


def _damage(checkpoint: Path, folder: Path, change) -> str:
    copy = shutil.copytree(checkpoint, folder)
    change(copy / "iter_0000004")
    return f"--load {copy}"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _drop_counters(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["counters"]
    (folder / "meta.json").write_text(json.dumps(meta))


def test_what_is_no_checkpoint_is_one_clear_error(data, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("")
    cases = {
        f"--load {tmp_path / 'file'}": "is a file, not a folder of checkpoints",
        f"--load {tmp_path / 'other'}": "holds no checkpoint (it has files, but no latest_checkpointed_iteration.txt)",
        f"--load {checkpoint} --ckpt-step 3": "complete ones in",
        f"--load {checkpoint} --hidden-size 64": "is of another model: hidden_size 32 there, 64 here",
        f"--load {checkpoint} --lr 1e-4": "the schedule changed since the checkpoint was saved",
        _damage(checkpoint, tmp_path / "1", lambda c: (c / "__2_0.distcp").unlink()): "__2_0.distcp",
        _damage(checkpoint, tmp_path / "2", lambda c: _cut(c / "__1_0.distcp")): "cannot be loaded",
        _damage(checkpoint, tmp_path / "3", lambda c: _cut(c / ".metadata")): "cannot be loaded",
        _damage(checkpoint, tmp_path / "4", lambda c: _cut(c / "meta.json")): "meta.json is damaged",
        _damage(checkpoint, tmp_path / "5", _drop_counters): "meta.json is damaged (it lacks counters)",
        _damage(checkpoint, tmp_path / "6", lambda c: (c / "meta.json").unlink()): "is not a complete checkpoint",
        f"--save {tmp_path / 'file'} --save-interval 1": "File exists",
        f"--load {tmp_path / 'none'} --exit-on-missing-checkpoint": "holds no checkpoint",
    }
    results = run_ranks(1, call_pretrain, *(flags(data, NO_DROPOUT, case) for case in cases))[0]
    for (case, expected), (code, _, err) in zip(cases.items(), results, strict=True):
        assert code == 2, case
        assert err.startswith("error: ") and err.count("\n") == 1 and expected in err, f"{case}: {err}"


def test_an_empty_or_absent_folder_starts_from_scratch(data, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    for folder in (tmp_path, tmp_path / "absent"):
        ((code, out, err),) = run_ranks(1, call_pretrain, flags(data, f"--load {folder} --train-iters 1"))[0]
        assert code == 0, err
        assert f"no checkpoint in {folder} yet: starting from scratch" in out
