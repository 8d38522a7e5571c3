"""The programs under other packages' loops: they run as they are, and a run that resumes ends in the same bits."""

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
HALF = STEPS // 2


def output_of(script: str, *words: str) -> str:
    process = torchrun(4, [*words], script=script)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out + err


def losses_of(*words: str) -> list[float]:
    """Return the losses that one of the examples prints."""
    out = output_of("examples/library/on_cpus.py", *words)
    lines = re.findall(r"step: *(\d+) .*?loss: *([\d.]+)|step (\d+): loss ([\d.]+)", out)
    losses = {int(step or titans_step): float(loss or titans) for titans_step, titans, step, loss in lines}
    return [losses[step] for step in sorted(losses)]


def saved_in(folder: Path) -> dict:
    """Return all that a checkpoint of torch.distributed.checkpoint holds."""
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


# Of each: the program, the folder of its last checkpoint, the parts of this, and words that resume from the middle one.
PROGRAMS = {
    "huggingface_trainer": (
        f"checkpoint-{STEPS}",
        ["pytorch_model_fsdp_0", "optimizer_0", "zeropp"],
        ["--resume", f"{{folder}}/checkpoint-{HALF}"],
    ),
    "fabric_llama": (f"{STEPS}", [".", "zeropp"], ["--resume", f"{HALF}"]),
    "torchtitan_llama": (f"checkpoint/step-{STEPS}", ["."], []),  # resumes from the last checkpoint
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_learns_and_resumes_to_the_bit(tmp_path, name):
    end, parts, resume = PROGRAMS[name]
    program = (f"examples/library/{name}.py", "--output", str(tmp_path), "--steps", str(STEPS))
    losses = losses_of(*program)
    before = [saved_in(tmp_path / end / part) for part in parts]
    shutil.rmtree(tmp_path / end)
    again = losses_of(*program, *(word.format(folder=tmp_path) for word in resume))
    assert len(losses) == STEPS and losses[-1] < 0.97 * losses[0]
    assert again[-HALF:] == losses[HALF:]
    for whole, part in zip(before, parts, strict=True):
        assert whole
        assert_same(whole, saved_in(tmp_path / end / part))


@pytest.mark.parametrize("words", ["--weight-bits 4", "--weight-bits 8 --moves --nf4"])
def test_lora_sends_little_more_than_the_adapters_between_nodes(words):
    out = output_of("examples/library/lora.py", *words.split())
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 4
    first, *later = [float(per_element) for per_element in re.findall(r"bytes, ([\d.]+) per", out)]
    assert later[-1] <= 1.1 * (0.5 + 0.5) < first  # weights and gradients
    if "--moves" in words:  # fewer codes move as the loss falls
        assert later == sorted(set(later), reverse=True) and later[0] < 1.557  # what all 8-bit codes take
    else:
        assert set(later) == {later[0]}
