"""benchmarks/trainer.py and benchmarks/gpu.sh, as far as a machine without a GPU goes."""

import json
import re
import shlex
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.tools import run
from tests.warm_python import programs

SMALL = ["--no-compile", "--steps", "2", "--rounds", "1", "--profiled-steps", "1"]
PARTS = {"forward", "backward", "optimizer", "collectives", "quantizers", "data", "other"}


def measure(folder, *arguments, ranks=0):
    launcher = [programs() / "python"]
    if ranks:
        launcher = [programs() / "torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    output = folder / "new" / "trainer.jsonl"
    command = [*launcher, "benchmarks/trainer.py", *SMALL, *arguments, "--output", output]
    # On the CPU also where there is a GPU: what is tested here is the program.
    done = run(*command, timeout=None, CUDA_VISIBLE_DEVICES="")
    return [json.loads(line) for line in output.read_text().splitlines()], done.stdout


def check_parts(result):
    host = result["parts"]["host_ms"]
    assert set(host) == PARTS
    assert sum(host.values()) == pytest.approx(result["parts"]["step_ms"], rel=0.01)  # none missing, none counted twice
    assert all(host[part] > 0 for part in PARTS - {"quantizers"}), host
    return host


def test_both_sides_do_the_same_work(tmp_path):
    results, printed = measure(tmp_path, "--model", "tiny-gpt", "--model", "tiny-llama", "--micro-batch-size", "3")
    assert [result["model"] for result in results] == ["tiny-gpt", "tiny-llama"]
    for result in results:
        ours, plain = result["ours"], result["plain"]
        # bf16 in both, but plain PyTorch's residual stream is fp32.
        assert ours["loss_of_first_step"] == pytest.approx(plain["loss_of_first_step"], abs=2e-3)
        assert ours["loss_of_last_step"] == pytest.approx(plain["loss_of_last_step"], abs=1e-2)
        assert ours["loss_of_last_step"] < ours["loss_of_first_step"]
        assert result["micro_batch_size"] == plain["micro_batch_size"] == 3
        assert ours["mfu"] is None and ours["peak_memory_gb"] is None  # a CPU has neither
        assert check_parts(result)["quantizers"] == 0
    assert printed.count("| quantizers | 0.00 | - | - |") == 2


def test_ranks_that_share_a_device_are_profiled_and_quantizers_are_a_part_of_their_own(tmp_path):
    flags = "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 1 --num-workers 0"
    (result,), printed = measure(tmp_path, "--model", "tiny-gpt", "--flags", flags, ranks=2)
    assert result["ranks"] == 2 and result["plain"] is None and result["parts"]["launches"] is None
    assert printed.count("| collectives |") == 1
    assert check_parts(result)["quantizers"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [["first"], [], ["python"]], ids=["no GPU", "nothing to run", "no such part"])
def test_gpu_script_says_what_it_needs(words, tmp_path):
    done = run("benchmarks/gpu.sh", tmp_path / "results", *words, status=2, PYTHON=sys.executable)
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "results").exists()


SIZES = {("gpt-350m", "tiny-gpt"), ("cuda", "cpu")}
SIZES |= {("cuda or built", "one_pass and cpu or built")}
SIZES |= {(f"{tests} and cuda", f"{tests} and cpu") for tests in ("training_equals_gloo", "every_collective")}


def parts_of_gpu_script(scale):
    """Each part's most seconds and its words, by its name."""
    lines = run("benchmarks/gpu.sh", "--list", SCALE=scale).stdout.splitlines()
    parts = [line.split(": ", 3) for line in lines]
    return {name: (call, int(seconds), shlex.split(words)) for call, name, seconds, words in parts}


def test_what_was_tried_on_a_processor_is_what_the_card_runs():
    """But for sizes: else the card's minutes go to a command that nobody has ever run."""
    card, tiny = parts_of_gpu_script("gpu"), parts_of_gpu_script("tiny")
    assert card.keys() == tiny.keys()
    for name, (call, seconds, words) in card.items():
        assert tiny[name][:2] == (call, seconds)
        for large, small in zip(words, tiny[name][2], strict=True):
            only_numbers_differ = re.sub(r"[\d.]+", "", large) == re.sub(r"[\d.]+", "", small)
            assert only_numbers_differ or (large, small) in SIZES, name


def test_the_checklist_has_time_for_every_part():
    """Seconds as the page states them, and as the script allows them."""
    text = (ROOT / "docs" / "how-to" / "gpu-checklist.md").read_text()
    rows = re.findall(r"^\| (first|second|both|left) \| (.+?) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    for command, minutes in [("first", 7), ("second", 3)]:
        assert sum(int(expected) for when, _, expected, _ in rows if when in (command, "both")) < 60 * minutes
    parts, stated = parts_of_gpu_script("gpu"), set()
    for _, names, _, most in rows:
        members = re.findall(r"`([a-z0-9-]+)`", names)
        limits = [parts[name][1] for name in members]
        assert int(most) == (max(limits) if "train-int8" in members else sum(limits)), names  # side by side
        stated |= {*members}
    assert stated == parts.keys()


@pytest.mark.long
def test_gpu_script_runs_all_parts_with_tiny_models_and_then_nothing_again(quickstart, tmp_path):
    text, results = quickstart.folder / "runs" / "quickstart", tmp_path / "results"
    own = dict(SCALE="tiny", BUDGET="3000", PYTHON=str(programs() / "python"), TEXT=str(text))
    for _ in range(2):
        for command in ("first", "second"):
            run("benchmarks/gpu.sh", results, command, timeout=None, **own)
    verdicts = [tuple(line.split()[:2]) for line in (results / "summary.txt").read_text().splitlines()]
    passed = [name for verdict, name in verdicts if verdict == "passed"]
    assert len(passed) == len(set(passed))
    without_gpu = {"machine", "build", "memcheck", "racecheck"}
    assert {("skipped", name) for name in without_gpu} == {each for each in verdicts if each[0] != "passed"}
    files = {"log.txt", "summary.txt", "kernels.json", "trainer.jsonl", "bf16", "int8"}
    assert {path.name for path in results.iterdir()} == files
    result = json.loads((results / "trainer.jsonl").read_text().splitlines()[0])
    assert result["estimated_memory_gb"] > 0
    printed = (results / "log.txt").read_text()
    assert all(f"train-{arm}:  validation loss at iteration 20" in printed for arm in ("bf16", "int8"))
