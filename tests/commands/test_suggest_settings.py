"""Settings are ranked by what short runs on local ranks did."""

import argparse
import re
import subprocess
from typing import Any

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands import suggest_settings
from megatron_zpp.commands.suggest_settings import BETWEEN, Outcome, measure, suggest, table
from megatron_zpp.families import GPT
from megatron_zpp.metrics.history import RunHistory
from tests.tools import run
from tests.training.small_run import SHAPE

RUN = f"{SHAPE} --micro-batch-size 1 --lr 3e-3 --num-workers 0 --tokenizer-type ByteTokenizer"


def call(*words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = ("python", "tools/suggest_settings.py", "gpt", "--local-ranks", "4", *words)
    return run(*command, status=status, timeout=None)


@pytest.mark.long
def test_settings_are_trained_and_ranked_by_bytes(data):
    tries = [f"--zero-quantized-gradients --zeropp-gradient-bits {bits}" for bits in (2, 8)]
    words = ["--iterations", "20", "--link-gbps", "10", *(word for setting in tries for word in ("--try", setting))]
    result = call(*words, "--", *RUN.split(), "--data-path", data)
    rows = [line for line in result.stdout.splitlines() if re.search(r"\d+\.\d+ +[-+]\d+\.\d\d%", line)]
    assert [row.split("  ")[0] for row in rows] == ["ZeRO-3", tries[1], tries[0]]
    numbers = [re.search(r"([\d.]+) +[-+][\d.]+% +([\d.]+) +([\d.]+)$", row).groups() for row in rows]
    losses, megabytes, seconds = zip(*(map(float, row) for row in numbers), strict=True)
    assert losses[2] > losses[1]  # 2 bits lose more than 8
    assert megabytes[0] > 2 * megabytes[1]
    assert seconds[0] == pytest.approx(megabytes[0] * 8e6 / 10e9, abs=1e-4)
    assert re.search(r"Suggested: .+\n  --", result.stdout)


@pytest.fixture
def trained(monkeypatch) -> list[list[str]]:
    """The flags of each run that ``measure`` starts; the n-th's loss is n."""
    runs: list[list[str]] = []

    def train(architecture: str, flags: list[str]) -> RunHistory:
        runs.append(flags)
        return RunHistory("run", metrics={"lm loss": {1: float(len(runs))}, BETWEEN: {1: 1.0}})

    monkeypatch.setattr(suggest_settings, "train", train)
    return runs


def measured(given: str = "", **more: Any) -> tuple[list[Outcome], float | None]:
    shape = dict(architecture="gpt", local_ranks=4, local_nodes=2, iterations=20)
    args = argparse.Namespace(**(shape | dict(tried=["--zero-quantized-gradients"]) | more))
    return measure(args, [*RUN.split(), "--mock-data", *given.split()])


@pytest.mark.parametrize(("given", "std"), [("", 0.02), ("--init-method-std 0.01", 0.01)])
def test_noise_is_the_first_setting_again_on_the_same_data_with_larger_weights(trained, given, std):
    outcomes, noise = measured(given)
    assert len(trained) == 3 and noise == 3 - 1
    first, again = (parse_settings(GPT, flags, note=lambda _: None).as_flat_dict() for flags in trained[::2])
    assert again.pop("init_method_std") == pytest.approx(1.001 * std) and first.pop("init_method_std") == std
    assert first == again  # the seed too: it also decides the order of samples
    assert "0.1 % larger move the first one's loss by 200.00 %." in table(outcomes, noise, None)


def test_finetuning_has_no_initial_weights_to_change(trained):
    outcomes, noise = measured("--load checkpoints --finetune")
    assert len(trained) == 2 and noise is None
    assert "Noise: not measured" in table(outcomes, noise, None)
    assert suggest(outcomes, noise) == outcomes[0]


def test_a_setting_that_fails_leaves_the_others(monkeypatch):
    def train(architecture: str, flags: list[str]) -> RunHistory:
        if "--zero-quantized-gradients" in flags:
            raise ChildProcessError("NaN in 10 steps in a row")
        return RunHistory("run", metrics={"lm loss": {1: 4.0}, BETWEEN: {1: 1.0}})

    monkeypatch.setattr(suggest_settings, "train", train)
    outcomes, noise = measured()
    assert suggest(outcomes, noise).name == "ZeRO-3"
    assert re.search(r"--zero-quantized-gradients +failed: NaN in 10 steps", table(outcomes, noise, None))


def test_the_fewest_bytes_within_the_noise_are_suggested():
    losses = {"zero3": (4.0, 100), "a": (4.005, 30), "b": (4.03, 20), "c": (9.9, 10), "nan": (float("nan"), 1)}
    outcomes = [Outcome(name, "", loss, nbytes) for name, (loss, nbytes) in losses.items()]
    assert suggest(outcomes, noise=0.0).name == "a"  # within 0.25 %
    assert suggest(outcomes, noise=0.05).name == "b"
    assert suggest([outcomes[0], outcomes[-1]], noise=1.0).name == "zero3"


SCRATCH = "every setting starts from scratch: leave --save,"


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ("", None, "after --"),
        ("", "--num-layers 2", "--seq-length"),
        ("--local-nodes 3", f"{RUN} --mock-data", "must be 2 or more, and divide --local-ranks 4"),
        ("--iterations 3", f"{RUN} --mock-data", "too short"),
        (
            "",
            f"{RUN} --mock-data --zero-quantized-gradients --zeropp-loco",
            "error: --zero-quantized-gradients, --zeropp-loco would be in every setting",
        ),
        ("", f"{RUN} --mock-data --lr-warmup-iters 200", "warms up over 200 of --iterations 400"),
        ("", f"{RUN} --mock-data --lr-warmup-tokens 38400", "warms up over 300 of --iterations 400"),
        ("", f"{RUN} --mock-data --save checkpoints --save-interval 10", SCRATCH),
        ("", f"{RUN} --mock-data --load checkpoints", SCRATCH),
        ("", f"{RUN} --mock-data --tensorboard-dir events", SCRATCH),
        ("", f"{RUN} --mock-data --wandb-project project", SCRATCH),
    ],
)
def test_mistakes_come_to_light_before_anything_is_trained(words, given, message):
    result = call(*words.split(), *(["--", *given.split()] if given else []), status=None)
    assert result.returncode in (1, 2) and message in result.stderr
