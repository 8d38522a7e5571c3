"""The programs under other packages' loops: they run as they are, and a run that resumes ends in the same bits."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training.small_run import ended, torchrun

pytestmark = pytest.mark.integrations
STEPS = 8
HALF = STEPS // 2


def output_of(script: str, *words: str) -> str:
    return "".join(ended(torchrun(4, [*words], script=script)))


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


# Per example: the program, its last checkpoint's folder, that folder's parts, and words that resume the middle one.
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
    assert steps[0][1][1] < 2.2  # the weights' codes once, and the gradients'


CASES = [
    "accelerate",
    "Hugging Face Trainer",
    "Lightning Trainer",
    "torchtitan, chunked loss",
    "Llama, fp16 and GradScaler",
    "Llama, torchao AdamW8bit",
]


def test_other_loops_train_as_plain_fsdp2_and_cross_nodes_once_per_step(tmp_path):
    """One test, since workers of pytest-xdist would each run the program for theirs."""
    results = tmp_path / "rows.jsonl"
    words = ["benchmarks/other_loops.py", *CASES, "--steps", "2", "--results", str(results)]
    output_of("examples/library/on_cpus.py", *words)
    all_rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = {(row["case"], row["setting"], row["accumulation"]): row for row in all_rows}
    assert len(rows) == len(CASES) * 3 * 2
    for case in CASES:
        for accumulation in (1, 4):
            off, hierarchy, all_flags = (
                rows[case, setting, accumulation]["largest_loss_difference"]
                for setting in ("off", "hierarchy", "all flags")
            )
            assert off == 0 and hierarchy < 1e-5 and 0 < all_flags < 0.1, case
        for setting in ("hierarchy", "all flags"):
            one, four = (rows[case, setting, accumulation]["bytes_between_nodes"] for accumulation in (1, 4))
            # torchtitan's chunked loss gathers by hand, and a look for unseen changes crosses each time: 6 bytes.
            assert four == pytest.approx(one, rel=2e-5), case
        off, all_flags = (rows[case, setting, 4]["bytes_between_nodes"][-1] for setting in ("off", "all flags"))
        assert all_flags < off / 10, case
