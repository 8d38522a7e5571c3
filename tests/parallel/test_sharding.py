"""What each ZeRO stage keeps on a rank, and how often it communicates."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.init import init_weights
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import prepare_backward, shard_model
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.models.configs import gpt_config
from tests.ranks import run_in_turn


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
