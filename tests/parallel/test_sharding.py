"""What each ZeRO stage keeps and sends, and HSDP: replicas of shards train as ZeRO-3 and plain FSDP2 do."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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
from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp
from tests.models.configs import gpt_config
from tests.parallel.layouts import EPS, TIMEOUT
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, train_each

CONFIG = gpt_config(2, 16, 2, 33, 8, attention_dropout=0.0, hidden_dropout=0.0)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_MICRO_BATCHES, NUM_STEPS = 2, 2


def sharded(shard: Callable[[Decoder], Any], tie_embeddings: bool = True) -> tuple[Decoder, Any]:
    """A decoder that ``shard`` takes on the meta device, and what that returned."""
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings))
    returned = shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    return model, returned


def ours(model: Decoder, stage: int = 3, replicas: int = 1, ranks_per_node: int | None = None) -> ZeroPP | None:
    shard_model(model, Mesh("cpu", replicas=replicas), stage, POLICY, OffloadPolicy())
    return apply_zeropp(model, ZeroPPConfig(ranks_per_node=ranks_per_node)) if stage > 0 else None


def _order_of_gradients() -> list[str]:
    """Units of an untied model, in the order in which a backward pass reduces them."""
    model, zeropp = sharded(ours, tie_embeddings=False)
    order = list[str]()
    for unit in zeropp.units:
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: order.append(unit.label))
    tokens = torch.full((1, 8), dist.get_rank())
    model(tokens, tokens).mean().backward()
    return list(dict.fromkeys(order))


def test_the_output_layer_need_not_wait_for_the_embedding():
    for order in run_ranks(2, _order_of_gradients):
        assert order[:3] == ["output_layer", "layers.1", "layers.0"]
        assert set(order[3:]) == {"word_embeddings", "the root module"}


REPLICAS = "--num-distributed-optimizer-instances"
HSDP = f"{REPLICAS} 2 --zeropp-ranks-per-node 2"


def test_it_trains_like_zero_3_at_every_stage(data):
    common = f"{NO_DROPOUT} {EPS} --train-iters 2 --eval-interval 1 --log-params-norm --log-num-zeros-in-grad"
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


def _fsdp2_alone(model: Decoder) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)


def _trained(is_ours: bool) -> list[Tensor]:
    """Losses, and this rank's shards after NUM_STEPS."""
    model, _ = sharded(partial(ours, replicas=2, ranks_per_node=2) if is_ours else _fsdp2_alone)
    optimizer, results = torch.optim.AdamW(model.parameters()), list[Tensor]()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS):
        for i in range(NUM_MICRO_BATCHES):
            is_last = i == NUM_MICRO_BATCHES - 1
            if is_ours:
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
    return _trained(True), _trained(False)


def test_it_is_fsdp2s_own_to_the_bit():
    ranks = run_ranks(4, _both)
    for ours, expected in ranks:
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    shards = [ours[NUM_STEPS * NUM_MICRO_BATCHES :] for ours, _ in ranks]
    for of_ranks in zip(*shards, strict=True):
        assert all(torch.equal(of_ranks[rank], of_ranks[rank + 2]) for rank in (0, 1))  # the replicas
