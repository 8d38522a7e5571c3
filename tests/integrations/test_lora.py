"""The example of LoRA with PEFT: what crosses nodes is the adapters' own, and the loss falls."""

import re

import pytest

from tests.training.small_run import torchrun

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize("words", ["--weight-bits 4", "--weight-bits 8 --moves"])
def test_little_more_than_the_adapters_crosses_nodes(words):
    process = torchrun(4, words.split(), script="examples/library/lora.py")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 4
    first, *later = [float(per_element) for per_element in re.findall(r"bytes, ([\d.]+) per", out)]
    assert set(later) == {later[0]} and later[0] <= 1.1 * (0.5 + 0.5) < first  # weights and gradients
