"""A run's lines, read as published tools read Megatron's: by regular expressions, not by our own reader."""

from __future__ import annotations

import contextlib
import io
import math
import re
import time

from megatron_zpp.training.pretrain import train
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, write_text

ITERATION = re.compile(r"iteration +(\d+)/ *(\d+)")
ALWAYS = {
    "consumed samples": r"consumed samples: +(\d+)",
    "elapsed": r"elapsed time per iteration \(ms\): ([\d.]+)",
    "throughput": r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)",
    "learning rate": r"learning rate: ([\d.Ee+-]+)",
    "global batch size": r"global batch size: +(\d+)",
    "loss scale": r"loss scale: ([\d.]+)",
    "skipped": r"number of skipped iterations: +(\d+)",
    "nan": r"number of nan iterations: +(\d+)",
}
OF_STEPS_THAT_COUNT = {"lm loss": r"lm loss: ([\d.Ee+-]+)", "grad norm": r"grad norm: ([\d.]+)"}
NAN, INFINITE = 2, 3  # steps


def _printed(argv: list[str]):
    """What a run prints of which two steps are skipped, and the values behind it."""
    run, metrics = start(argv)

    def hook(model, inputs, losses):
        return losses * {NAN: math.nan, INFINITE: math.inf}.get(run.counters.iteration + 1, 1.0)

    run.model.register_forward_hook(hook)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(run, time.monotonic())
    return out.getvalue(), metrics


def test_published_expressions_match(tmp_path):
    argv = flags(write_text(tmp_path), "--log-throughput --eval-iters 0 --log-interval 1", length="--train-iters 5")
    text, metrics = run_ranks(1, _printed, argv)[0]
    lines = [line for line in text.splitlines() if ITERATION.search(line) and "learning rate" in line]
    assert [ITERATION.search(line).groups() for line in lines] == [(str(n), "5") for n in range(1, 6)]
    for i, line in enumerate(lines):
        found = {name: float(re.search(pattern, line)[1]) for name, pattern in ALWAYS.items()}
        assert found["consumed samples"] == 8 * (i + 1) and found["global batch size"] == 8
        assert found["elapsed"] > 0 and found["throughput"] >= 0 and found["loss scale"] == 1
        skipped = i + 1 in (NAN, INFINITE)
        assert (found["skipped"], found["nan"]) == (skipped, skipped)
        for name, pattern in OF_STEPS_THAT_COUNT.items():
            assert (name in line) == (re.search(pattern, line) is not None) == (not skipped), name
        if not skipped:
            assert float(re.search(OF_STEPS_THAT_COUNT["lm loss"], line)[1]) == float(f"{metrics['lm loss'][i]:.6E}")
            assert float(re.search(OF_STEPS_THAT_COUNT["grad norm"], line)[1]) == round(metrics["grad-norm"][i], 3)


def test_a_line_of_several_steps_leaves_the_skipped_ones_out(tmp_path):
    argv = flags(write_text(tmp_path), "--eval-iters 0 --log-interval 4", length="--train-iters 4")
    text, metrics = run_ranks(1, _printed, argv)[0]
    line = next(line for line in text.splitlines() if " 4/ " in line and "lm loss" in line)
    assert float(re.search(OF_STEPS_THAT_COUNT["lm loss"], line)[1]) == float(f"{metrics['lm loss'][3]:.6E}")
    assert re.search(ALWAYS["skipped"], line)[1] == re.search(ALWAYS["nan"], line)[1] == "2"
