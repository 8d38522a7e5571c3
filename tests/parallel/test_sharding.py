"""In which order a backward pass reduces units, and HSDP: replicas of shards train as ZeRO-3 does."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.init import init_weights
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import shard_model
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.models.configs import gpt_config
from tests.parallel.layouts import EPS, TIMEOUT
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, train_each

CONFIG = gpt_config(2, 16, 2, 33, 8, attention_dropout=0.0, hidden_dropout=0.0, tie_embeddings=False)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _order_of_gradients() -> list[str]:
    """Units of an untied model, in the order in which a backward pass reduces them."""
    with torch.device("meta"):
        model = Decoder(CONFIG)
    shard_model(model, Mesh("cpu"), 3, POLICY, OffloadPolicy())
    zeropp = apply_zeropp(model, ZeroPPConfig())
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
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
