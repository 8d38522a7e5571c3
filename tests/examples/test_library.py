"""The programs that put ZeRO++ under somebody's own FSDP2 model run as they stand, and their loss falls."""

import re

import pytest

from tests.training.small_run import torchrun


@pytest.mark.long
@pytest.mark.parametrize("program", ["plain_pytorch.py", "huggingface_llama.py", "islands.py"])
def test_the_loss_falls(program):
    process = torchrun(4, [], script=f"examples/library/{program}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4 and losses[-1] < 0.96 * losses[0]
    sent = [float(megabytes) for megabytes in re.findall(r"sent ([\d.]+) MB", out)]
    assert sent[0] > 0 and len(set(sent)) == 1  # the same every step
