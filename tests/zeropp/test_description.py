"""A configuration is described for some nodes and ranks, with the settings that have no effect there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.description import describe, settings_of_state, warn
from megatron_zpp.zeropp.fsdp.topology import Topology
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import shard

GATHERS = "at every gather; gradients"
SAID = [  # nodes and ranks of each unit, settings, and what is said of them
    ([(1, 1)], ZeroPPConfig(True), ["1 node of 1 rank; nothing is sent"]),
    (
        [(2, 1)],
        ZeroPPConfig(True, weight_bits=3, weight_rounding="stochastic"),
        [f"2 nodes of 1 rank; weights are sent int3 (stochastic) {GATHERS} unquantized at every micro-batch; seed 0"],
    ),
    (
        [(2, 2)],
        ZeroPPConfig(False, 2, True, weight_moves=True, offload="copies", gradient_bits=None),
        [
            "2 nodes of 2 ranks; weights are sent as moves of bits between nodes once per step, unquantized within a "
            "node at every gather, from host memory; gradients int8 within a node at every micro-batch, unquantized "
            "between nodes once per step"
        ],
    ),
    (
        [(2, 2), (2, 2), (1, 2)],
        ZeroPPConfig(
            *(True, 2, True, LoCoConfig(hops="both")),
            **dict(weight_intra_bits=6, gradient_bits=2, gradient_element_scales=True, gradient_sum_dtype="int8"),
        ),
        [
            "2 nodes of 2 ranks; weights are sent int8 between nodes once per step, int6 within a node "
            f"{GATHERS} int8 with LoCo (beta 0.8) within a node at every micro-batch, int2 (mean, element scales) "
            "with LoCo (beta 0.8) between nodes once per step, kept as int8 (stochastic) between micro-batches; seed 0 "
            "(2 units)",
            f"1 node of 2 ranks; weights are sent int8 {GATHERS} int8 with LoCo (beta 0.8) within a node at every "
            "micro-batch, kept as int8 (stochastic) between micro-batches; seed 0 (1 unit)",
        ],
    ),
]


@pytest.mark.parametrize("shapes, config, expected", SAID)
def test_what_is_sent_is_said_in_words(shapes, config, expected):
    units = [SimpleNamespace(topology=Topology(*shape, 0, *(None,) * 4)) for shape in shapes]
    assert describe(config, units).splitlines() == expected


def test_states_are_told_apart_by_the_settings_of_what_they_keep():
    config = ZeroPPConfig(quantized_gradients=True, loco=LoCoConfig())
    sums = dict(gradient_sum_dtype="int8", offload="sums")
    same = (dict(seed=7), sums, dict(loco=LoCoConfig(exact_undo=False)))
    others = (dict(gradient_element_scales=True), dict(loco=LoCoConfig(beta=0.5)))
    equal = [settings_of_state(replace(config, **each)) == settings_of_state(config) for each in (*same, *others)]
    assert equal == [True] * 3 + [False] * 2


NF4 = ZeroPPConfig(hpz_partition_size=2, frozen_dtype="nf4")
ON_FOUR = {  # model, whether it is frozen, and config; what the warnings must say, and must not
    "NF4 of frozen weights": (64, True, NF4, [], ["frozen_dtype", "hpZ"]),
    "NF4 of trained weights": (64, False, NF4, ["frozen_dtype has no effect"], ["hpZ"]),
    "one node": (
        8,
        False,
        ZeroPPConfig(True, 4, True, LoCoConfig(), frozen_dtype="nf4"),
        ["hpZ has no effect", "LoCo has no effect", "frozen_dtype has no effect"],
        [],
    ),
    "LoCo within a node": (
        8,
        False,
        ZeroPPConfig(quantized_gradients=True, loco=LoCoConfig(hops="both")),
        ["matrices of the root module are sent unquantized: a rank holds fewer than 32 elements"],
        ["LoCo"],
    ),
    "qgZ on one node": (
        32,
        False,
        ZeroPPConfig(quantized_gradients=True, gradient_intra_bits=None),
        ["qgZ has no effect on 4 data-parallel ranks on one node"],
        ["matrices"],
    ),
    "small matrices, qwZ": (8, False, ZeroPPConfig(True, ranks_per_node=2), ["matrices of the root module"], []),
    "small matrices, hpZ": (8, False, ZeroPPConfig(False, 2), [], ["matrices"]),
}


def _warnings():
    found = {}
    for name, (width, is_frozen, config, _, _) in ON_FOUR.items():
        model = nn.Linear(width, width).requires_grad_(not is_frozen)
        with CapturedWarnings() as warnings:
            shard(model, config)
        found[name] = " ".join(warnings.messages)
    return found


def test_settings_without_effect_are_named_on_the_first_rank():
    first, *others = run_in_turn(4, {"warnings": _warnings})["warnings"]
    for name, (*_, expected, unexpected) in ON_FOUR.items():
        assert all(text in first[name] for text in expected), (name, first[name])
        assert not any(text in first[name] for text in unexpected), (name, first[name])
    assert not any("".join(other.values()) for other in others)


def test_one_queue_for_all_streams_is_warned_of(caplog, monkeypatch):
    for connections, warns in (("8", False), ("1", True)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        warn(ZeroPPConfig(), [], torch.device("cpu"))
        assert not caplog.messages
        warn(ZeroPPConfig(), [], torch.device("cuda"))
        assert [message.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 puts") for message in caplog.messages] == [
            True
        ] * warns
