"""The programs under other packages' loops run as they stand, and a run that resumes ends in the same bits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training.small_run import torchrun

pytestmark = pytest.mark.integrations
STEPS = 8


def run(*words: str) -> list[float]:
    """The losses that one of the examples printed."""
    process = torchrun(4, list(words), script="examples/library/on_cpus.py")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    lines = re.findall(r"step: *(\d+) .*?loss: *([\d.]+)|step (\d+): loss ([\d.]+)", out + err)
    losses = {int(step or titans_step): float(loss or titans) for titans_step, titans, step, loss in lines}
    return [losses[step] for step in sorted(losses)]


def saved(folder: Path) -> dict:
    """All that a checkpoint of torch.distributed.checkpoint holds."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def assert_same(whole, resumed) -> None:
    assert type(whole) is type(resumed)
    if isinstance(whole, dict):
        assert whole.keys() == resumed.keys()
        for key in whole:
            assert_same(whole[key], resumed[key])
    elif isinstance(whole, torch.Tensor):
        assert whole.dtype == resumed.dtype and torch.equal(whole, resumed)


def check(losses: list[float], again: list[float], before: list[dict], after: list[dict]) -> None:
    """The loss falls, the second half gives the same losses again, and then there are the same files."""
    assert len(losses) == STEPS and losses[-1] < 0.97 * losses[0]
    assert again[-STEPS // 2 :] == losses[STEPS // 2 :]
    for whole, resumed in zip(before, after, strict=True):
        assert whole
        assert_same(whole, resumed)


def test_huggingface_trainer(tmp_path):
    program = ("examples/library/huggingface_trainer.py", "--output", str(tmp_path), "--steps", str(STEPS))
    half, end = tmp_path / f"checkpoint-{STEPS // 2}", tmp_path / f"checkpoint-{STEPS}"
    parts = ("pytorch_model_fsdp_0", "optimizer_0", "zeropp")
    losses = run(*program)
    before = [saved(end / part) for part in parts]
    shutil.rmtree(end)
    again = run(*program, "--resume", str(half))
    check(losses, again, before, [saved(end / part) for part in parts])


def test_lightning_fabric(tmp_path):
    program = ("examples/library/fabric_llama.py", "--output", str(tmp_path), "--steps", str(STEPS))
    end = tmp_path / str(STEPS)
    losses = run(*program)
    before = [saved(folder) for folder in (end, end / "zeropp")]
    shutil.rmtree(end)
    again = run(*program, "--resume", str(STEPS // 2))
    check(losses, again, before, [saved(folder) for folder in (end, end / "zeropp")])


def test_torchtitan(tmp_path):
    program = ("examples/library/torchtitan_llama.py", "--output", str(tmp_path), "--steps", str(STEPS))
    end = tmp_path / "checkpoint" / f"step-{STEPS}"
    losses = run(*program)
    before = saved(end)
    shutil.rmtree(end)
    again = run(*program)  # goes on from the last checkpoint
    check(losses, again, [before], [saved(end)])
