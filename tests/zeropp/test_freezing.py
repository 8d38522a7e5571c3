"""Parameters may be frozen and unfrozen at any moment, also in a unit that the next pass skips, as under plain FSDP2.

The oracle is plain FSDP2, to the bit. Gradients are chosen: each is a multiple of 1/8, so the order of additions
changes nothing.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.zeropp import apply_zeropp
from tests.ranks import run_ranks
from tests.zeropp.training_on_ranks import HIERARCHY_ONLY, local, shards

CONFIGS = {
    "fp32 sums": HIERARCHY_ONLY,
    "offloaded bf16 sums": replace(HIERARCHY_ONLY, gradient_sum_dtype="bf16", offload="sums"),
}
NUM_STEPS, MICRO_BATCHES = 4, 2


class Layer(nn.Module):
    """Two matrices and a bias. Every element's gradient is the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in ((6, 3), (5, 2), (3,))])

    def forward(self, x: Tensor) -> Tensor:
        return sum((weight * x.mean()).sum() for weight in self.weights)


class Net(nn.Module):
    """Two layers, of which the first can be skipped, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.layers[1](x) + (0 if skips else self.layers[0](x)) + (self.scale * x.mean()).sum()


def train(config, seed, finds_unused=True):
    """Gradients and weights of every step, while parameters of the first layer freeze, unfreeze and are skipped."""
    draw = random.Random(seed)
    holds_back, reshards = draw.random() < 0.5, draw.random() < 0.5
    model = Net()
    for module in (*model.layers, model):
        fully_shard(module, reshard_after_forward=reshards)
    if config is not None:
        apply_zeropp(model, config, find_unused_parameters=finds_unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, foreach=True)
    if not finds_unused:  # to which zeros are as good as no gradient
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def maybe_change():
        """Freeze or unfreeze a parameter or the whole layer."""
        part = draw.choice([model.layers[0], *model.layers[0].weights])
        if draw.random() < 0.4:
            part.requires_grad_(draw.random() < 0.5)

    results = []
    for _ in range(NUM_STEPS):
        for i in range(MICRO_BATCHES):
            (model.set_requires_gradient_sync if holds_back else model.set_is_last_backward)(i == MICRO_BATCHES - 1)
            maybe_change()
            x = torch.full((3,), (dist.get_rank() + draw.randrange(8) - 4) / 8)
            loss = model(x, skips=draw.random() < 0.4)
            maybe_change()
            loss.backward()
        if finds_unused:
            results += [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        results += shards(model)
    return results


def differs(first, second):
    return (first is None) != (second is None) or (first is not None and not local(first).equal(local(second)))


def _wrong(seeds):
    """The runs whose results differ from plain FSDP2's, by seed and configuration."""
    wrong = []
    for seed in seeds:
        plain = train(None, seed)
        for name, config in CONFIGS.items():
            if any(map(differs, plain, train(config, seed))):
                wrong.append((seed, name))
    return wrong


def _wrong_with_zeros(seeds):
    def train_each(config):
        return [tensor for seed in seeds for tensor in train(config, seed, finds_unused=False)]

    return any(map(differs, train_each(None), train_each(HIERARCHY_ONLY)))


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 12), marks=pytest.mark.long)])
def test_a_run_that_freezes_what_the_next_pass_skips_trains_as_under_plain_fsdp2(seeds):
    assert run_ranks(4, _wrong, seeds) == [[]] * 4


def test_without_find_unused_parameters_it_does_too_where_zeros_are_as_good_as_no_gradient():
    assert run_ranks(4, _wrong_with_zeros, range(12, 16)) == [False] * 4
