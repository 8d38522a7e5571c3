"""TRL's trainers under ZeRO++: all of a trainer's models send what they must, and no more."""

from __future__ import annotations

import math
import re

import pytest

from tests.integrations.test_examples import output_of

pytestmark = pytest.mark.integrations


def steps_of(tmp_path, *words: str) -> list[tuple[dict[str, float], list[float]]]:
    """Return what each step logged, and its bytes per parameter: of each model between nodes and within them."""
    program = ("examples/library/trl_trainers.py", *words, "--output", str(tmp_path))
    out = output_of("examples/library/on_cpus.py", *program)
    lines = re.findall(r"^step \d+: (.*); bytes (.*)$", out, re.MULTILINE)
    return [
        ({name: float(value) for name, value in re.findall(r"(\w+) (-?[\d.]+)", logged)}, [*map(float, sent.split())])
        for logged, sent in lines
    ]


def test_sft_learns_and_its_adapters_alone_cross_nodes(tmp_path):
    (first, at_first), *_, (last, at_last) = steps_of(tmp_path, "sft", "--lora", "--steps", "12")
    assert last["loss"] < 0.8 * first["loss"]
    assert at_last[0] < 0.5 * at_first[0]


def test_policy_and_reference_of_dpo_round_alike_and_the_reference_crosses_nodes_once(tmp_path):
    (first, at_first), *later = steps_of(tmp_path, "dpo", "--steps", "4")
    assert first["loss"] == round(math.log(2), 7) > later[-1][0]["loss"]
    assert min(at_first) > 0 and [sent[2:] for _, sent in later] == [[0, 0]] * 3


def test_rollouts_and_further_iterations_of_grpo_gather_nothing(tmp_path):
    steps = steps_of(tmp_path, "grpo", "--steps", "8")
    assert len({(between, within) for _, (between, within) in steps}) == 1  # those with rollouts, and those without
    assert steps[0][1][1] < 2.2  # the weights' codes once, and those of the gradients
