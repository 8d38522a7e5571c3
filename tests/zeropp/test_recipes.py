"""Recipes by name under an FSDP2 model: the nodes are those that the ranks run on."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import RECIPES, apply_zeropp
from tests.ranks import run_ranks

STEPS = 4


def _train(name: str | None) -> tuple[list[torch.Tensor], object]:
    """Return the weights that each forward pass computes with, and the recipe's settings."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)  # as torchrun's agents on two nodes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    zeropp = apply_zeropp(model, name) if name is not None else None
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(8, 32)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, None if zeropp is None else zeropp.config


def _train_each() -> dict[str | None, tuple[list[torch.Tensor], object]]:
    return {name: _train(name) for name in (None, *RECIPES)}


def test_recipes_know_their_nodes_and_lossless_is_fsdp2():
    for results in run_ranks(4, _train_each):
        plain, _ = results[None]
        for name, (weights, config) in results.items():
            if name is not None:
                assert config == RECIPES[name].config(2, 500), name
            assert torch.equal(weights[0], plain[0]) or "quantized_weights" in RECIPES[name].fields, name
        # Sums of gradients have another order than gloo's ring: a weight may round to the next number of bf16.
        for ours, fsdp2 in zip(results[[*RECIPES][1]][0], plain, strict=True):
            torch.testing.assert_close(ours, fsdp2, rtol=2**-7, atol=1e-6)
        assert not torch.equal(results["int8"][0][-1], plain[-1])


@pytest.mark.parametrize("name, said", [("auto", "megatron-zpp plan"), ("int7", ", ".join(RECIPES))])
def test_other_names_say_what_works(name, said):
    (error,) = run_ranks(1, _error_of, name)
    assert said in error


def _error_of(name: str) -> str:
    model = nn.Linear(8, 8)
    fully_shard(model)
    with pytest.raises(ValueError) as raised:
        apply_zeropp(model, name)
    return str(raised.value)
