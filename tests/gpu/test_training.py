"""The whole training path with four ranks on one device, through the staging backend, beside the same runs on gloo."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from tests.gpu.staged_backend import NAME, register
from tests.ranks import run_ranks
from tests.training.small_run import ROOT, ended, flags, torchrun, train_each

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
ALL_FLAGS = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
RECIPES = {
    "plain": "",
    "plain, stage 1": "--zero-stage 1",
    "all flags": ALL_FLAGS,
    "LoCo": f"{ALL_FLAGS} --zeropp-loco",
    "moved codes": f"{ALL_FLAGS} --zeropp-loco --zeropp-weight-moves",
    "least memory": f"{ALL_FLAGS} --zeropp-loco --zeropp-weight-moves "
    "--zeropp-gradient-sum-dtype int8 --zeropp-offload-gradient-sums",
    "all flags, bf16": f"{ALL_FLAGS} --bf16",
    "float8": f"{ALL_FLAGS} --bf16 --fp8-format hybrid",  # emulated on CPUs
    "float8, rows": f"{ALL_FLAGS} --bf16 --fp8-format e4m3",
}


def losses_and_norms(runs, device, store=None):
    """Each run's losses and gradient norms, step by step; with a ``store`` (a file) through the staging backend."""
    if store is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.barrier()  # a rank that leaves early would take the others' store along
        dist.destroy_process_group()
        register()
        dist.init_process_group(NAME, init_method=f"file://{store}", rank=rank, world_size=world_size)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where DeviceMesh sees a GPU it brings NCCL into gloo's groups
    results = train_each(runs, device=device)
    return {name: (metrics["lm loss"], metrics["grad-norm"]) for name, metrics in results.items()}


@pytest.fixture(scope="module")
def runs(data):
    return {name: flags(data, recipe) for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def on_gloo(runs):
    return run_ranks(4, losses_and_norms, runs, "cpu")[0]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), CUDA])
def test_training_equals_gloo(device, runs, on_gloo, tmp_path):
    """On CPU tensors to the bit. A GPU adds up in another order, and a value may be rounded to the next level."""
    results = run_ranks(4, losses_and_norms, runs, device, str(tmp_path / "store"), timeout=300)
    assert all(result == results[0] for result in results)
    if device == "cpu":
        assert results[0] == on_gloo
    for name, (losses, norms) in on_gloo.items():
        assert results[0][name][0] == pytest.approx(losses, rel=1e-3), name
        assert results[0][name][1] == pytest.approx(norms, rel=2e-2), name


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_program_resumes(runs, tmp_path):
    """pretrain_gpt.py under torchrun: what it saves and loads on the device continues as if it had not stopped."""

    def losses(*more):
        argv = ["cuda", str(ROOT / "pretrain_gpt.py"), *runs["moved codes"], *more]
        out, _ = ended(torchrun(4, argv, script="tests/gpu/share_device.py"))
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", out)]

    whole = losses("--save", str(tmp_path), "--save-interval", "4", "--train-iters", "8")
    resumed = losses("--load", str(tmp_path), "--ckpt-step", "4", "--train-iters", "8")
    assert len(whole) == 8
    assert resumed == pytest.approx(whole[4:], rel=1e-3)
