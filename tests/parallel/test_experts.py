"""Mixtures of experts: every layout trains as one rank does, tokens' bytes are counted, and checkpoints move."""

import dataclasses
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from megatron_zpp.models.mlp import Activation
from megatron_zpp.models.moe import MoE, MoEConfig
from megatron_zpp.parallel.experts import TokenExchange
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.zeropp import LoCoConfig, Traffic, ZeroPPConfig, apply_zeropp
from tests.parallel.layouts import EPS, Result, assert_same, assert_trains_as_one_rank, results_on
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, flags

SHAPE = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001 "
    f"--micro-batch-size 2 {EPS} --log-params-norm --lr-decay-style constant"
)
SHARED = "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 24"
LIKE_GPT = f"{SHAPE} {SHARED} --moe-router-topk 1 --moe-router-pre-softmax {NO_DROPOUT}"
PYRAMID = (
    f"{SHAPE} {NO_DROPOUT} --moe-layer-freq 2 --moe-first-layer 2 --moe-residual "
    "--num-experts 8 --moe-experts-per-layer 4,8"
)
UNQUANTIZED = "--zero-quantized-gradients --zeropp-gradient-bits 0 --zeropp-gradient-intra-bits 0"
HIERARCHY = f"--zero-hpz-partition-size 2 {UNQUANTIZED}"
QUANTIZED = (
    "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zeropp-weight-moves"
)
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
VIRTUAL_ZERO_BUBBLE = f"{PP2} --pipeline-schedule zero-bubble --num-layers-per-virtual-pipeline-stage 1"
SOME = {
    "ep 2, hierarchy, selectively recomputed": f"{EP2} {HIERARCHY} --recompute-activations",
    "tp 2, ep 2": f"{TP2} {EP2} --sequence-parallel",
}
MORE = {
    "ep 4, hierarchy": f"{EP4} {HIERARCHY}",
    "ep 2 at stage 1, per token": f"{EP2} --zero-stage 1 --calculate-per-token-loss",
    "ep 2 at stage 2, recomputed": f"{EP2} --zero-stage 2 --recompute-granularity full",
    "tp 4": "--tensor-model-parallel-size 4",
    "pp 2, ep 2": f"{PP2} {EP2}",
    "zero-bubble, ep 2": f"{VIRTUAL_ZERO_BUBBLE} {EP2}",
    "cp 2, ep 2": f"--context-parallel-size 2 {EP2}",
    "offloaded": f"{EP2} --cpu-offload",
    "ep 2 in each of 2 replicas": f"{EP2} --num-distributed-optimizer-instances 2",
}
WITHOUT_EP = {
    1: {"recomputed": "--recompute-granularity full"},
    2: {
        "pp, recomputed": f"{PP2} --recompute-granularity full",
        "pp, per token": f"{PP2} --calculate-per-token-loss",
        "zero-bubble": VIRTUAL_ZERO_BUBBLE,
    },
    4: {"dp 4": "", "stage 1, per token": "--zero-stage 1 --calculate-per-token-loss", "hierarchy": HIERARCHY},
}


def some_and(*names: str) -> dict[int, dict[str, str]]:
    return {4: SOME | {name: MORE[name] for name in names}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "common", "layouts"),
    [
        ("llama", SHAPE, some_and(*MORE)),
        ("llama", SHAPE, WITHOUT_EP),
        ("gpt", LIKE_GPT, some_and("pp 2, ep 2")),
        ("gpt", PYRAMID, some_and("pp 2, ep 2")),
    ],
    ids=["like Mixtral", "without ep", "like GPT", "a pyramid of residual experts"],
)
def test_training_equals_one_rank(data, architecture, common, layouts):
    also = ("load balancing loss", "router z-loss", "lm loss")
    if layouts is WITHOUT_EP:
        also += ("router entropy", "expert load (max/mean)")
    # Rounding turns a token to another expert now and then; its gradient jumps, and the losses hardly move.
    tolerance = 1e-5 if layouts is WITHOUT_EP else 1e-4
    common = f"{common} --train-iters 2"
    assert_trains_as_one_rank(data, architecture, common, layouts, also=also, tolerance=tolerance)


def trained(data: str, ranks: int, iterations: int, *more: str) -> Result:
    (result,) = results_on(ranks, {"": ("llama", flags(data, SHAPE, *more, f"--train-iters {iterations}"))}).values()
    return result


def test_quantized_ranks_train_as_unquantized_ones(data):
    shape = f"{SHARED} --moe-expert-capacity-factor 1.0 --num-layers 2 --eval-iters 0"
    plain, quantized = trained(data, 4, 3, f"--bf16 {shape}"), trained(data, 4, 3, f"{QUANTIZED} {shape}")
    assert quantized[0]["lm loss"] == pytest.approx(plain[0]["lm loss"], rel=1e-2)
    assert quantized[0]["lm loss"] != plain[0]["lm loss"]
    assert all(0 < share < 0.5 for share in quantized[0]["dropped tokens (share)"])


def test_capacity_drops_the_same_tokens_wherever_experts_are(data):
    capacity = "--num-layers 2 --moe-expert-capacity-factor 1.0"
    # On two nodes ranks tell each other how many rows come; on one the rows are padded.
    two_nodes = f"{EP2} --zeropp-ranks-per-node 1"
    whole = trained(data, 2, 1, capacity)
    for name, division in (("padded", EP2), ("two nodes", two_nodes), ("tensor-parallel", TP2)):
        divided = trained(data, 2, 1, capacity, division)
        assert_same(divided, whole, name)
        assert divided[0]["dropped tokens (share)"] == whole[0]["dropped tokens (share)"]
        assert all(0 < share < 0.5 for share in divided[0]["dropped tokens (share)"])


def evaluated_alone_and_divided(lengths: list[int]) -> float:
    """The largest difference of what divided experts make of this rank's own sample, which is as long as it says."""
    config = MoEConfig(4, 24, router_topk=2, expert_capacity_factor=1.25)
    moe = MoE(config, 16, Activation("silu", is_gated=True), shared_expert=None).eval()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, lengths[dist.get_rank()], 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        alone, _ = moe(x)
        for parameter in moe.experts.parameters():
            parameter.data = parameter.data.chunk(2)[dist.get_rank()].clone()
        moe.run_experts = TokenExchange(Mesh("cpu", expert_parallel=2), None, None, Traffic())
        return float((moe(x)[0] - alone).abs().max())


def test_evaluations_may_be_of_another_length_on_each_rank():
    assert max(run_ranks(2, evaluated_alone_and_divided, [8, 12])) < 1e-5


@pytest.mark.long
def test_a_resume_with_low_bits_goes_on_to_the_bit(data, tmp_path):
    save, load = f"--save {tmp_path} --save-interval 3 --no-async-save", f"--load {tmp_path}"
    whole, _, resumed = (trained(data, 4, n, QUANTIZED, EP2, of) for n, of in ((6, ""), (3, save), (6, load)))
    assert resumed[0]["lm loss"] == whole[0]["lm loss"][3:]
    assert_same(resumed, whole, "resumed", tolerance=0)


@pytest.mark.long
def test_tokens_are_counted_and_may_be_sent_in_few_bits(data):
    """Two nodes of one rank. Each choice of a token sends four rows: there and back, and their gradients."""
    common = f"{EP2} --zeropp-ranks-per-node 1 --moe-router-topk 4"  # each token goes to all experts, two on each rank
    kinds = {
        "fp32": "",
        "int8": "--moe-token-bits 8",
        "int4": "--moe-token-bits 4",
        "recomputed": "--recompute-granularity full",
    }
    ran = {name: trained(data, 2, 4, common, more) for name, more in kinds.items()}
    pattern = r"tokens sent between nodes per step \(MB\): ([\d.]+)"
    sent = {name: [float(megabytes) for megabytes in re.findall(pattern, result[2])] for name, result in ran.items()}
    hidden, layers, tokens = 32, 4, 8 * 32
    rows = layers * tokens * 4 // 2  # per step: half of a token's experts are on the other rank
    row_bytes = {"fp32": 4 * hidden, "int8": 48, "int4": 32}  # codes and a scale, up to a multiple of 16
    for name, size in row_bytes.items():
        assert sent[name] == pytest.approx([4 * rows * size / 1e6] * 4, abs=0.0006), name
    assert sent["recomputed"] == pytest.approx([6 * rows * row_bytes["fp32"] / 1e6] * 4, abs=0.0006)
    exact = ran["fp32"][0]["lm loss"]
    assert ran["int8"][0]["lm loss"] == pytest.approx(exact, rel=1e-3)
    assert ran["int8"][0]["lm loss"] != exact
    assert ran["int4"][0]["lm loss"] == pytest.approx(exact, rel=2e-2)


def gradients_of_a_shunned_expert(config, first_step_to_it):
    """Return for each of three steps the largest gradient of the last expert, which gets no token, and of the others.

    With ``first_step_to_it`` all tokens of the first step go there.
    """
    torch.manual_seed(0)
    moe = MoE(MoEConfig(4, 24, router_topk=1), 16, Activation("silu", is_gated=True), shared_expert=None)
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
