"""What a configuration is said to do on some nodes and ranks, against the bytes it sends and the state it keeps."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.description import warn
from tests.ranks import run_in_turn, run_ranks
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import backward, shard

NUMEL, BLOCK, MICRO_BATCHES = 64 * 96, 32, 2
LOCO = LoCoConfig(beta=0.7)
WEIGHTS = [
    dict(),
    dict(quantized_weights=True),
    dict(quantized_weights=True, weight_bits=3, weight_rounding="stochastic"),
    dict(hpz=True),
    dict(hpz=True, quantized_weights=True),
    dict(hpz=True, quantized_weights=True, weight_intra_bits=6, weight_rounding="stochastic"),
    dict(hpz=True, quantized_weights=True, hpz_secondary_dtype="int8"),
    dict(hpz=True, quantized_weights=True, weight_intra_bits=8),
]
GRADIENTS = [
    dict(),
    dict(gradient_rounding="stochastic"),
    *(
        dict(quantized_gradients=True, **options)
        for options in (
            dict(),
            dict(loco=LOCO),
            dict(loco=LoCoConfig(beta=0.7, hops="both"), gradient_rounding="stochastic"),
            dict(gradient_intra_bits=None, loco=LOCO),
            dict(gradient_bits=None),
            dict(gradient_bits=None, gradient_intra_bits=None),
            dict(gradient_sum_dtype="int8", loco=LOCO),
            dict(gradient_element_scales=True, gradient_bits=2, loco=LOCO),
        )
    ),
]


def configs(ranks_per_node):
    """The grid for nodes of ``ranks_per_node``, thinned so that all weights and all gradients occur."""
    grid = [weights | gradients for weights, gradients in itertools.product(WEIGHTS, GRADIENTS)]
    grid = grid[::7] if ranks_per_node > 1 else [options for options in grid if "hpz" not in options][::3]
    blocks = dict.fromkeys(["weight_block_size", "gradient_block_size"], BLOCK)
    for options in grid:
        size = ranks_per_node if options.get("hpz") else 1
        options = {name: value for name, value in options.items() if name != "hpz"}
        yield ZeroPPConfig(hpz_partition_size=size, ranks_per_node=ranks_per_node, **options, **blocks)


CLAUSE = re.compile(
    r"(unquantized|int(?P<bits>\d))"
    r"( \((?P<mean>mean)?(, )?(?P<scales>element scales)?(, )?(?P<noise>stochastic)?\))?"
    r"(?P<loco> with LoCo \(beta 0.7\))?"
    r"( (?P<where>between nodes|within a node))? (?P<when>once per step|at every gather|at every micro-batch)"
)


def said(description, num_nodes, ranks_per_node):
    """By the text alone: bytes of all ranks within and between nodes in a step, hops with a state, and noise."""
    plural = ["s" if n > 1 else "" for n in (num_nodes, ranks_per_node)]
    nodes, rest = description.split("; ", 1)
    assert nodes == f"{num_nodes} node{plural[0]} of {ranks_per_node} rank{plural[1]}"
    if rest == "nothing is sent":
        return 0, 0, set(), False
    weights, gradients, *seed = rest.split("; ")
    assert seed in ([], ["seed 5"])
    world_size = num_nodes * ranks_per_node
    numel = NUMEL // world_size
    within = between = 0
    hops, noise = set(), False
    for what, text in (("weights", weights.removeprefix("weights are sent ")), ("gradients", gradients[10:])):
        for clause in re.split(r", (?![^(]*\))", text):
            if clause == "kept as int8 (stochastic) between micro-batches":
                noise = True
                continue
            match = CLAUSE.fullmatch(clause)
            assert match, clause
            assert (match["mean"] is not None) == (what == "gradients" and match["bits"] in ("1", "2", "3")), clause
            nbytes = 4 * numel if match["bits"] is None else numel * int(match["bits"]) // 8 + 4 * numel // BLOCK
            # The root unit stays gathered from forward to backward.
            nbytes *= 1 if match["when"] == "once per step" else MICRO_BATCHES
            if match["where"] == "between nodes":
                between += world_size * (num_nodes - 1) * nbytes
            elif match["where"] == "within a node":
                within += world_size * (ranks_per_node - 1) * num_nodes * nbytes
            else:  # a ring over all ranks; gloo's reduce-scatter goes round twice
                nbytes *= (world_size - 1) * (2 if what == "gradients" else 1)
                crossing = num_nodes if num_nodes > 1 else 0
                between += crossing * nbytes
                within += (world_size - crossing) * nbytes
            if match["loco"]:
                hops.add("inter" if match["where"] == "between nodes" else "intra")
            if match["scales"]:
                hops.add("scales")
            noise |= match["noise"] is not None
    assert bool(seed) == noise
    return within, between, hops, noise


def train(model, zeropp):
    """Return the description, the second step's bytes, the kept state, and this rank's weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(2):
        zeropp.traffic.take()
        backward(zeropp, lambda *_: model(torch.randn(4, 64, generator=generator)).square().mean(), step, MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    sent = zeropp.traffic.take()
    hops = {name.split("/")[-1].removesuffix(".error") for name in zeropp.state_dict() if name.endswith(".error")}
    hops |= {"scales" for name in zeropp.state_dict() if "/element_scales." in name}
    return zeropp.describe(), sent.intra_node, sent.inter_node, hops, model.weight.to_local().detach().clone()


def train_configs(ranks_per_node):
    """For each configuration, what ``train`` returns with two seeds."""
    results = []
    for config in configs(ranks_per_node):
        for seed in (5, 6):
            torch.manual_seed(0)
            model = nn.Linear(64, 96, bias=False)
            results.append(train(model, shard(model, replace(config, seed=seed))))
    return results


@pytest.mark.parametrize("num_nodes, ranks_per_node", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_ranks_do_what_is_said(num_nodes, ranks_per_node):
    ranks = run_ranks(num_nodes * ranks_per_node, train_configs, ranks_per_node, timeout=240)
    for i, config in enumerate(configs(ranks_per_node)):
        first, second = ([of_rank[2 * i + seed] for of_rank in ranks] for seed in (0, 1))
        description, _, _, kept, _ = first[0]
        within, between, hops, noise = said(description, num_nodes, ranks_per_node)
        sent = [sum(of_rank[level] for of_rank in first) for level in (1, 2)]
        assert [*sent, kept] == [within, between, hops], (description, config)
        is_same = all(one[-1].equal(other[-1]) for one, other in zip(first, second, strict=True))
        assert is_same != noise, (description, config)


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
