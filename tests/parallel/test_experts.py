"""Mixtures of experts in every layout that takes them: training equals one rank's, and goes on after a resume."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from megatron_zpp.models.moe import MoE, MoEConfig
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from tests.parallel.layouts import EPS, assert_same, results_on
from tests.ranks import run_in_turn
from tests.training.small_run import flags, write_text

SHAPE = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001 "
    "--micro-batch-size 2"
)
SHARED = "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 24"
CAPACITY = "--moe-expert-capacity-factor 1.0"
UNQUANTIZED = "--zero-quantized-gradients --zeropp-gradient-bits 0 --zeropp-gradient-intra-bits 0"
QUANTIZED = (
    "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zeropp-weight-moves"
)
ON_ONE = {"": "", "recomputed": "--recompute-granularity full", "emulated": "--emulate-ranks 4 --emulate-nodes 2"}
ON_FOUR = {
    "dp 4": "",
    "stage 1, per token": "--zero-stage 1 --calculate-per-token-loss",
    "hierarchy": f"--zero-hpz-partition-size 2 {UNQUANTIZED}",
}
ON_TWO = {
    "pp": "--pipeline-model-parallel-size 2",
    "pp, recomputed": "--pipeline-model-parallel-size 2 --recompute-granularity full",
    "zero-bubble": "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble "
    "--num-layers-per-virtual-pipeline-stage 1",
}
LOSSES = ("load balancing loss", "router z-loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def runs(data: str, of: dict[str, str], length: str = "--train-iters 6") -> dict:
    common = f"{SHAPE} {EPS} --log-params-norm --lr-decay-style constant"
    return {name: ("llama", flags(data, common, more, length=length)) for name, more in of.items()}


@pytest.mark.long
def test_training_equals_one_rank(data):
    of_one = results_on(1, runs(data, ON_ONE))
    expected = of_one[""]
    for name, result in {**of_one, **results_on(2, runs(data, ON_TWO)), **results_on(4, runs(data, ON_FOUR))}.items():
        assert_same(result, expected, name)
        for key in (*LOSSES, "router entropy"):
            assert result[0][key] == pytest.approx(expected[0][key], rel=1e-5), f"{name}, {key}"
        assert result[0]["expert load (max/mean)"] == pytest.approx(expected[0]["expert load (max/mean)"], rel=1e-6)


def test_quantized_ranks_equal_emulated_ones(data):
    real = results_on(4, runs(data, {"": f"{QUANTIZED} {SHARED} {CAPACITY}"}))[""]
    emulated = results_on(1, runs(data, {"": f"{QUANTIZED} {SHARED} {CAPACITY} --emulate-ranks 4 --emulate-nodes 2"}))[
        ""
    ]
    assert real[0]["lm loss"] == emulated[0]["lm loss"]
    assert all(0 < share < 0.5 for share in real[0]["dropped tokens (share)"])


@pytest.mark.long
def test_a_resume_on_other_ranks_goes_on(data, tmp_path):
    save, load = f"--save {tmp_path} --save-interval 3 --no-async-save", f"--load {tmp_path}"
    whole = results_on(1, runs(data, {"": SHARED}))[""]
    results_on(2, runs(data, {"": f"{SHARED} {save}"}, length="--train-iters 3"))
    resumed = results_on(4, runs(data, {"": f"{SHARED} {load} --override-data"}))[""]
    assert len(resumed[0]["lm loss"]) == 3
    assert_same(resumed, whole, "resumed")


def gradients_of_a_shunned_expert(config, first_step_to_it):
    """Of each of three steps the largest gradient of the last expert, to which no token goes, and of the others.

    With ``first_step_to_it`` all tokens of the first step go there.
    """
    torch.manual_seed(0)
    moe = MoE(MoEConfig(4, 24, 1), 16, swiglu=True, shared_expert=None)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.3)
    towards, x = torch.zeros(4, 1), torch.rand(4, 32, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    fully_shard(moe)
    zeropp = apply_zeropp(moe, config) if config is not None else None
    moe.router.register_forward_hook(lambda module, inputs, logits: logits + towards.T)
    found = []
    for step in range(3):
        towards[3] = 10 if first_step_to_it and step == 0 else -10
        y, _ = moe(x)
        y.square().sum().backward()
        gradients = [p.grad.full_tensor().unflatten(0, (4, -1)).abs() for p in moe.experts.parameters()]
        found.append([max(g[e].max().item() for g in gradients for e in es) for es in ([3], [0, 1, 2])])
        moe.zero_grad()
    assert zeropp is None or zeropp.traffic.inter_node > 0
    return found


LOW_BITS = dict(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, gradient_block_size=32)


@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.long) for bits in (8, 2, 1))])
def test_an_expert_without_tokens_gets_no_gradient(bits):
    """As in plain training, so that Adam moves it no more."""
    config = ZeroPPConfig(**LOW_BITS, gradient_bits=bits, gradient_intra_bits=bits)
    with_loco = dataclasses.replace(config, loco=LoCoConfig(hops="both"))
    never = {"plain": None, "low": config, "LoCo": with_loco}
    functions = {name: partial(gradients_of_a_shunned_expert, each, False) for name, each in never.items()}
    found = run_in_turn(4, functions | {"at first": partial(gradients_of_a_shunned_expert, with_loco, True)})
    for name in never:
        assert all(of_step[0] == 0 < of_step[1] for of_step in found[name][0]), name
    # Later there is only what LoCo owes it from a step in which it had tokens: the error of that step.
    first, second, _ = found["at first"][0]
    assert second[0] <= 0.5 * first[0]
