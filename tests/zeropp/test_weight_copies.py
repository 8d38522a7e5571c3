"""Copies of weights on each card, or these, LoCo's errors and sums in host memory: the same bits as a node's copies."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import Net, evaluate, local, micro_batches, reshard, shard, shards

INT8 = ZeroPPConfig(quantized_weights=True, weight_block_size=32, hpz_partition_size=2)
WEIGHTS = replace(INT8, weight_moves=True)
RECIPE = {name: RECIPES[name].config(2, warmup_steps=1) for name in ("lossless", "int8", "int6")}
WITHOUT_MOVES = {"copies in 16 bits": INT8, "copies in int8": replace(INT8, hpz_secondary_dtype="int8")}
PLACES = {
    "node": {},
    "card": dict(weight_copies="card"),
    "host": dict(offload="all"),
    "errors": dict(offload="errors"),
    "card, host": dict(weight_copies="card", offload="copies"),
}
# where copies are in a run that must equal one with a node's
CASES = {
    "int8": ("card", "card, host", "errors", "host"),
    "lossless": ("card", "host"),
    "int6": ("card", "host"),
    "copies in int8": ("host",),
    "copies in 16 bits": ("host",),
}
PATHS = (("node", "card"), ("card", "host"), ("host", "errors"), ("errors", "node"))


def build(config, place="node"):
    config = replace(config, **PLACES[place])
    model = Net(width=32, hidden=64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    zeropp = shard(model, config, model.blocks, mp_policy=policy)
    return model, zeropp, torch.optim.AdamW(model.parameters(), lr=3e-3)


def inputs(step):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(model, zeropp, optimizer, steps):
    for step in steps:
        for i in micro_batches(zeropp, 2):
            model(inputs(2 * step + i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything_a_loop_does(config, place):
    """Steps, an evaluation, a swap, frozen and thawed weights, an undone step, resident passes; what each leaves."""
    model, zeropp, optimizer = build(config, place)
    zeropp.monitor_errors(2)
    train(model, zeropp, optimizer, range(3))
    zeropp.rescale_errors(0.5)
    errors = zeropp.quantization_errors()
    seen = [evaluate(model, inputs(50))]
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    seen.append(evaluate(model, inputs(51)))
    model.blocks[1].requires_grad_(False)
    train(model, zeropp, optimizer, range(3, 5))
    model.blocks[1].requires_grad_(True)
    model(inputs(52)).square().mean().backward()
    zeropp.undo_step()
    optimizer.zero_grad()
    with zeropp.resident_weights():
        seen += [evaluate(model, inputs(53)) for _ in range(2)]
        train(model, zeropp, optimizer, range(5, 6))
    local(model.head.weight).mul_(2.0)  # without a word
    seen.append(evaluate(model, inputs(55)))
    train(model, zeropp, optimizer, range(6, 8))
    reshard(model)
    return [*seen, torch.tensor(list(errors.values())), *shards(model)]


def resumed_elsewhere(saved, loaded):
    """The weights of a run that goes on where its copies were, and of one that goes on where they are elsewhere."""
    ends = []
    for place in (saved, loaded):
        model, zeropp, optimizer = build(RECIPE["int8"], saved)
        train(model, zeropp, optimizer, range(2))
        state = copy.deepcopy((zeropp.state_dict(), optimizer.state_dict(), shards(model)))
        model, zeropp, optimizer = build(RECIPE["int8"], place)
        for parameter, weight in zip(model.parameters(), state[2], strict=True):
            local(parameter).copy_(weight)
        optimizer.load_state_dict(state[1])
        zeropp.load_state_dict(state[0])
        train(model, zeropp, optimizer, range(2, 4))
        reshard(model)
        ends.append(shards(model))
    return ends


def bytes_of_a_step(config, place):
    model, zeropp, optimizer = build(config, place)
    train(model, zeropp, optimizer, range(2))
    zeropp.traffic.take()
    train(model, zeropp, optimizer, range(2, 3))
    sent = zeropp.traffic.take()
    reshard(model)
    return shards(model), sent


@pytest.mark.parametrize("name", ["int8", *(pytest.param(name, marks=pytest.mark.long) for name in [*CASES][1:])])
def test_a_run_trains_and_evaluates_to_the_same_bits(name):
    config = (RECIPE | WITHOUT_MOVES)[name]
    cases = {place: partial(everything_a_loop_does, config, place) for place in ("node", *CASES[name])}
    found = run_in_turn(4, cases)
    for place in CASES[name]:
        for node, elsewhere in zip(found["node"], found[place], strict=True):
            assert all(a.equal(b) for a, b in zip(node, elsewhere, strict=True)), place


def test_a_saved_run_goes_on_where_its_copies_are_elsewhere():
    found = run_in_turn(4, {f"from {a} to {b}": partial(resumed_elsewhere, a, b) for a, b in PATHS})
    for path, ranks in found.items():
        for stayed, moved in ranks:
            assert all(x.equal(y) for x, y in zip(stayed, moved, strict=True)), path


def test_nothing_is_gathered_within_nodes_and_nodes_of_one_rank_send_moves():
    cases = {place: partial(bytes_of_a_step, WEIGHTS, place) for place in ("node", "card", "host")}
    alone = replace(WEIGHTS, weight_copies="card", hpz_partition_size=1, ranks_per_node=1)
    found = run_in_turn(4, cases | {"nodes of one rank": partial(bytes_of_a_step, alone, "node")})
    order = ("node", "card", "nodes of one rank", "host")
    node, card, alone, host = ([weights for weights, _ in found[case]] for case in order)
    for ranks in zip(node, card, alone, host, strict=True):
        assert all(a.equal(b) and a.equal(c) and a.equal(d) for a, b, c, d in zip(*ranks, strict=True))
    # Gradients go around FSDP2's ring: the first rank's stay within the node, the second's leave it.
    (first, second), (moved, passed_on), (_, apart), in_host = ([sent for _, sent in found[case][:2]] for case in order)
    assert passed_on.intra_node < second.intra_node / 2 and moved.inter_node < 1.5 * first.inter_node
    assert apart.intra_node == 0 and in_host == [first, second]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(weight_copies="card"), "weight_copies requires weight_moves"),
        (dict(offload="copies"), "offload copies requires hpz_partition_size"),
        (dict(offload="errors", quantized_gradients=True), "offload errors requires loco"),
        (dict(offload="all"), "offload all requires hpz_partition_size or loco or quantized_gradients"),
    ],
)
def test_what_nothing_makes_is_kept_nowhere(settings, said):
    with pytest.raises(ValueError, match=said):
        ZeroPPConfig(quantized_weights=True, **settings)
