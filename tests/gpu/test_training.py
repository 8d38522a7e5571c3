"""The whole training path with four ranks on one device, through the staging backend, beside the same runs on gloo."""

import os
import re
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.gpu import CUDA
from tests.gpu.share_device import restart_group
from tests.ranks import run_ranks
from tests.training.small_run import ended, flags, torchrun, train_each

ALL_FLAGS = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
RECIPES = {
    "plain": "",
    "plain, stage 1": "--zero-stage 1",
    "all flags": ALL_FLAGS,
    "LoCo": f"{ALL_FLAGS} --zeropp-loco",
    "moved codes": f"{ALL_FLAGS} --zeropp-loco --zeropp-weight-moves",
    "least memory": f"{ALL_FLAGS} --zeropp-loco --zeropp-weight-moves "
    "--zeropp-gradient-sum-dtype int8 --zeropp-offload all",
    "all flags, bf16": f"{ALL_FLAGS} --bf16",
    "stages of a pipeline": "--pipeline-model-parallel-size 2",
}
FLOAT8 = {  # emulated on CPUs
    "float8": f"{ALL_FLAGS} --bf16 --fp8-format hybrid",
    "float8, rows": f"{ALL_FLAGS} --bf16 --fp8-format e4m3",
}
ON_CPU = pytest.param("cpu", marks=pytest.mark.long)
# The test of benchmarks/gpu.sh runs this case.
IN_GPU_SCRIPT = pytest.param("cpu", marks=[pytest.mark.long, pytest.mark.evidence])


def losses_and_norms(runs, device, store=None):
    """Each run's losses and gradient norms, step by step; with a ``store`` (a file) through the staging backend."""
    if store is not None:
        restart_group(torch.device(device), store)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where DeviceMesh sees a GPU it brings NCCL into gloo's groups
    results = train_each(runs, device=device)
    return {name: (metrics["lm loss"], metrics["grad-norm"]) for name, metrics in results.items()}


def assert_equals_gloo(runs, device, folder):
    """On CPU tensors to the bit. A GPU adds up in another order, and a value may be rounded to the next level."""
    on_gloo = run_ranks(4, losses_and_norms, runs, "cpu")[0]
    device = "cuda:0" if device == "cuda" else device
    results = run_ranks(4, losses_and_norms, runs, device, str(folder / "store"), timeout=300)
    assert all(result == results[0] for result in results)
    if device == "cpu":
        assert results[0] == on_gloo
    for name, (losses, norms) in on_gloo.items():
        assert results[0][name][0] == pytest.approx(losses, rel=1e-3), name
        assert results[0][name][1] == pytest.approx(norms, rel=2e-2), name


@pytest.mark.parametrize("device", [IN_GPU_SCRIPT, CUDA])
def test_training_equals_gloo(device, data, tmp_path):
    assert_equals_gloo({name: flags(data, recipe) for name, recipe in RECIPES.items()}, device, tmp_path)


@pytest.mark.parametrize("device", [ON_CPU, CUDA])
def test_training_in_float8_equals_gloo(device, data, tmp_path):
    pytest.importorskip("torchao")
    assert_equals_gloo({name: flags(data, recipe) for name, recipe in FLOAT8.items()}, device, tmp_path)


def cards_chosen(store):
    """The cards that one rank chooses by itself, and that DeviceMesh chooses for it, on a machine with one card."""
    chosen = []
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(torch.cuda, "is_initialized", lambda: bool(chosen)),
        patch.object(torch.cuda, "set_device", lambda device: chosen.append(getattr(device, "index", device))),
    ):
        restart_group(torch.device("cuda", 0), store)
        init_device_mesh("cuda", (2,))
    return chosen


def test_no_rank_of_a_shared_card_asks_for_one_that_is_not_there(tmp_path):
    """DeviceMesh chooses card LOCAL_RANK for a rank that has chosen none."""
    assert run_ranks(2, cards_chosen, str(tmp_path / "store")) == [[0], [0]]


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_program_resumes(data, tmp_path):
    """pretrain_gpt.py --local-ranks 4: what it saves and loads on the device continues as if it had not stopped."""

    def losses(*more):
        local = ("--local-ranks", "4", "--local-nodes", "2")  # they share one GPU, or each has its own
        out, _ = ended(torchrun(0, [*flags(data, RECIPES["moved codes"]), *local, *more]))
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", out)]

    whole = losses("--save", str(tmp_path), "--save-interval", "4", "--train-iters", "8")
    resumed = losses("--load", str(tmp_path), "--ckpt-step", "4", "--train-iters", "8")
    assert len(whole) == 8
    assert resumed == pytest.approx(whole[4:], rel=1e-3)
