"""What each ZeRO stage keeps and sends, and HSDP: replicas of shards train as ZeRO-3 and plain FSDP2 do."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.init import init_weights
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import prepare_backward, shard_model
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.models.configs import gpt_config
from tests.parallel.layouts import EPS, TIMEOUT
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, flags, train_each


def _sharded_gpt(stage: int, tie_embeddings: bool = True) -> Decoder:
    shape = gpt_config(2, 16, 2, 32, 8, attention_dropout=0.0, hidden_dropout=0.0, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model = Decoder(shape)
    mesh = Mesh("cpu", replicas=dist.get_world_size() if stage == 0 else 1)
    shard_model(model, mesh, stage, MixedPrecisionPolicy(), OffloadPolicy())
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    return model


def _gathers_and_reductions(stage: int, num_micro_batches: int) -> tuple[int, int, int]:
    """Bytes that a rank sends in one optimizer step, and bytes of its shards of all blocks and of the rest."""
    model = _sharded_gpt(stage)
    zeropp = apply_zeropp(model, ZeroPPConfig())
    tokens = torch.full((1, 8), dist.get_rank())
    for i in range(num_micro_batches):
        prepare_backward(model, stage, is_last_micro_batch=i == num_micro_batches - 1)
        model(tokens, tokens).mean().backward()
    blocks = sum(p.to_local().nbytes for p in model.layers.parameters())
    return zeropp.traffic.take().intra_node, blocks, sum(p.to_local().nbytes for p in model.parameters()) - blocks


@pytest.fixture(scope="module")
def on_two_ranks():
    functions = {f"sent at stage {stage}": partial(_gathers_and_reductions, stage, 3) for stage in (1, 2, 3)}
    return run_in_turn(2, functions | {"order": _order_of_gradients})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_how_often_a_stage_gathers_and_reduces(on_two_ranks, stage):
    num_micro_batches = 3
    for sent, blocks, rest in on_two_ranks[f"sent at stage {stage}"]:
        gathers = num_micro_batches * (2 * blocks + rest) if stage == 3 else blocks + rest
        reductions = (1 if stage == 1 else num_micro_batches) * (blocks + rest)
        assert sent == gathers + 2 * reductions  # gloo's reduce-scatter sends twice


def _order_of_gradients() -> list[str]:
    """Units of an untied model, in the order in which a backward pass reduces them."""
    model = _sharded_gpt(3, tie_embeddings=False)
    zeropp, order = apply_zeropp(model, ZeroPPConfig()), list[str]()
    for unit in zeropp.units:
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: order.append(unit.label))
    tokens = torch.full((1, 8), dist.get_rank())
    model(tokens, tokens).mean().backward()
    return list(dict.fromkeys(order))


def test_the_output_layer_need_not_wait_for_the_embedding(on_two_ranks):
    for order in on_two_ranks["order"]:
        assert order[:3] == ["output_layer", "layers.1", "layers.0"]
        assert set(order[3:]) == {"word_embeddings", "the root module"}


def _elements_held(stage: int) -> tuple[int, int]:
    parameters = list(_sharded_gpt(stage).parameters())
    return sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)


def test_parameters_and_so_the_optimizer_are_sharded_from_stage_1_on():
    for stage, of_ranks in run_in_turn(4, {str(stage): partial(_elements_held, stage) for stage in range(4)}).items():
        for held, total in of_ranks:
            assert held == (total if stage == "0" else total // 4), stage


REPLICAS = "--num-distributed-optimizer-instances"
HSDP = f"{REPLICAS} 2 --zeropp-ranks-per-node 2"


def test_it_trains_like_zero_3_at_every_stage(data):
    common = f"{NO_DROPOUT} {EPS} --train-iters 4 --eval-interval 2 --log-params-norm --log-num-zeros-in-grad"
    hsdp = {stage: f"{HSDP} --zero-stage {stage}" for stage in (1, 2, 3)} | {"one rank each": f"{REPLICAS} 4"}
    runs = {name: flags(data, common, more) for name, more in {"ZeRO-3": "", **hsdp}.items()}
    metrics = run_ranks(4, train_each, runs, timeout=TIMEOUT)[-1]
    expected = metrics.pop("ZeRO-3")
    for name, run in metrics.items():
        # A norm that counted replicas would be sqrt(2) times as large.
        for key in ("lm loss", "lm loss validation", "grad-norm", "params-norm"):
            assert run[key] == pytest.approx(expected[key], rel=1e-6), (name, key)
        # Sums in another order are zero elsewhere.
        assert run["num-zeros"] == pytest.approx(expected["num-zeros"], abs=2), name


CONFIG = gpt_config(2, 16, 2, 33, 8, attention_dropout=0.0, hidden_dropout=0.0)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_MICRO_BATCHES, NUM_STEPS = 3, 2


def _ours(model: Decoder) -> None:
    shard_model(model, Mesh("cpu", replicas=2), 3, POLICY, OffloadPolicy())
    apply_zeropp(model, ZeroPPConfig(ranks_per_node=2))


def _fsdp2_alone(model: Decoder) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)


def _trained(ours: bool) -> list[Tensor]:
    """Losses, and this rank's shards after NUM_STEPS."""
    with torch.device("meta"):
        model = Decoder(CONFIG)
    (_ours if ours else _fsdp2_alone)(model)
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    optimizer, results = torch.optim.AdamW(model.parameters()), list[Tensor]()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS):
        for i in range(NUM_MICRO_BATCHES):
            is_last = i == NUM_MICRO_BATCHES - 1
            if ours:
                prepare_backward(model, 3, is_last)
            else:
                model.set_requires_all_reduce(is_last)
            tokens = torch.randint(33, (2, 8), generator=generator)
            loss = model(tokens, tokens).mean()
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.detach().to_local() for parameter in model.parameters()]


def _both() -> tuple[list[Tensor], list[Tensor]]:
    return _trained(ours=True), _trained(ours=False)


def test_it_is_fsdp2s_own_to_the_bit():
    ranks = run_ranks(4, _both)
    for ours, expected in ranks:
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    shards = [ours[NUM_STEPS * NUM_MICRO_BATCHES :] for ours, _ in ranks]
    for of_ranks in zip(*shards, strict=True):
        assert all(torch.equal(of_ranks[rank], of_ranks[rank + 2]) for rank in (0, 1))  # the replicas


Layout = tuple[int, int, int]  # replicas, ranks of a node, ZeRO stage


class Sent(NamedTuple):
    """What a rank says of one step."""

    between: int
    within: int
    shards: list[int]  # elements of each unit's, the root's first
    description: str


def _traffic(layouts: list[Layout]) -> list[Sent]:
    found = []
    for replicas, ranks_per_node, stage in layouts:
        with torch.device("meta"):
            model = Decoder(CONFIG)
        shard_model(model, Mesh("cpu", replicas=replicas), stage, POLICY, OffloadPolicy())
        zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=ranks_per_node))
        model.to_empty(device="cpu")
        init_weights(model, seed=1)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for i in range(NUM_MICRO_BATCHES):
            prepare_backward(model, stage, i == NUM_MICRO_BATCHES - 1)
            model(tokens, tokens).mean().backward()
        sent = zeropp.traffic.take()
        shards = {unit.name: unit.whole.numel for unit in zeropp.units}
        found.append(Sent(sent.inter_node, sent.intra_node, [shards.pop(""), *shards.values()], zeropp.describe()))
    return found


# A replica on a node; two; two on each of two nodes; one over two nodes; one rank each.
LAYOUTS = [(*on_nodes, stage) for on_nodes in [(2, 2), (2, 4), (4, 2), (2, 1)] for stage in (2, 3)]


def test_bytes_are_those_of_its_rings():
    of_ranks = run_ranks(4, _traffic, LAYOUTS)
    for i, (replicas, ranks_per_node, stage) in enumerate(LAYOUTS):
        size = 4 // replicas
        for rank, found in enumerate(of_ranks):
            sent = found[i]
            root, *blocks = sent.shards
            gathered = NUM_MICRO_BATCHES * (root + 2 * sum(blocks)) if stage == 3 else root + sum(blocks)
            reduced = 2 * NUM_MICRO_BATCHES * (root + sum(blocks))  # gloo's reduce-scatter sends twice
            in_replica = (size - 1) * (2 * gathered + 4 * reduced)
            over_replicas = sum(2 * (replicas - 1) * math.ceil(4 * unit / replicas) for unit in sent.shards)
            replica, shard = divmod(rank, size)
            next_in_replica = replica * size + (shard + 1) % size
            next_replica = (replica + 1) % replicas * size + shard
            expected = [0, 0]  # within nodes, between them
            expected[rank // ranks_per_node != next_in_replica // ranks_per_node] += in_replica
            expected[rank // ranks_per_node != next_replica // ranks_per_node] += over_replicas
            assert [sent.within, sent.between] == expected, (LAYOUTS[i], rank)
            assert sent.description.endswith(f"; in each of {replicas} replicas, whose gradients are added up")
