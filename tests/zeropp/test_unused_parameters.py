"""With find_unused_parameters, what no rank used has no gradient, and what some used the mean over all.

The oracle is one process that adds up the gradients of all ranks' micro-batches.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import ALL_FLAGS, HIERARCHY_ONLY, backward, shard

MICRO_BATCHES = 2


class Net(nn.Module):
    """A layer that is its own unit and is dropped at times, by all ranks; two heads, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.trunk = nn.Linear(24, 24), nn.Linear(24, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 9), nn.Linear(24, 9)])
        self.trunk.weight.requires_grad_(False)

    def forward(self, x: Tensor, uses_layer: bool, head: int) -> Tensor:
        x = self.trunk(x)
        return self.heads[head](x + self.layer(x) if uses_layer else x)


def used(step: int, micro_batch: int, rank: int) -> tuple[bool, int]:
    """Whether the layer is used, and which head."""
    return {
        0: (True, micro_batch),  # all of it
        1: (False, 0),  # neither the layer nor the second head
        2: (micro_batch == 0, 0),  # the layer by the first micro-batch alone
        3: (True, int(rank == 1 and micro_batch == 0)),  # the second head by one rank alone
        4: (False, 1),
    }[step]


def loss_of(model: Net, step: int, micro_batch: int, rank: int) -> Tensor:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))
    return model(x, *used(step, micro_batch, rank)).square().mean() / MICRO_BATCHES


def optimizer_of(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5, foreach=True)


def finish_step(model, optimizer):
    """Who has a gradient; then the optimizer's step."""
    has_gradient = [parameter.grad is not None for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return has_gradient


def in_one_process():
    model = Net()
    optimizer, has_gradient = optimizer_of(model), []
    for step in range(5):
        for i in range(MICRO_BATCHES):
            for rank in range(4):
                (loss_of(model, step, i, rank) / 4).backward()
        has_gradient.append(finish_step(model, optimizer))
    return has_gradient, [p.detach() for p in model.parameters()]


def trained(model, zeropp, steps=range(5)):
    """Who has a gradient in each step, and the parameters at the end."""
    optimizer, has_gradient = optimizer_of(model), []
    for step in steps:
        if step == 3:  # a step that is given up leaves no trace
            zeropp.set_is_last_micro_batch(False)
            loss_of(model, 0, 1, dist.get_rank()).backward()
            zeropp.undo_step()
            model.zero_grad()
        backward(zeropp, lambda *batch: loss_of(model, *batch), step, MICRO_BATCHES)
        has_gradient.append(finish_step(model, optimizer))
    return has_gradient, [p.full_tensor().detach() for p in model.parameters()]


def on_real_ranks(config, finds, steps):
    model = Net()
    zeropp = shard(model, None, [model.layer])
    if config is not None:
        zeropp = apply_zeropp(model, config, find_unused_parameters=finds)
    return trained(model, zeropp, steps)


def _all():
    exact, loco = (on_real_ranks(config, True, range(5)) for config in (HIERARCHY_ONLY, ALL_FLAGS))
    # Plain FSDP2 in a step in which all ranks use the same.
    return exact, on_real_ranks(HIERARCHY_ONLY, False, [1]), loco, on_real_ranks(None, False, [1])


@pytest.fixture(scope="module")
def found():
    return run_in_turn(4, {"trained": _all, "held back": _held_back_in_bf16, "refused": _refused})


def test_unused_parameters_are_as_in_one_process(found):
    has_gradient, expected = in_one_process()
    assert [row.count(False) for row in has_gradient] == [1, 5, 3, 1, 5]  # the frozen one; a layer or a head is two
    results = found["trained"]
    for (exact, parameters), (told_nothing, _), (loco, _), (plain, _) in results:
        assert exact == loco == has_gradient
        assert told_nothing != plain == [has_gradient[1]]
        for ours, one_process in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, one_process, rtol=1e-4, atol=1e-5)


def held_back_in_bf16(heads):
    """Gradients in fp32 of two micro-batches, of which the first is held back on each rank, through these heads."""
    model, policy = Net(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    apply_zeropp(model, HIERARCHY_ONLY)
    for i, head in enumerate(heads):
        model.set_requires_gradient_sync(i == len(heads) - 1)
        x = torch.full((4, 24), 1.0 + i + dist.get_rank())
        model(x, True, head).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.requires_grad]


def _refused():
    model = nn.Linear(8, 8)
    fully_shard(model)
    with pytest.raises(ValueError) as error:
        apply_zeropp(model, ZeroPPConfig(hpz_partition_size=2), find_unused_parameters=True)
    return str(error.value)


def _held_back_in_bf16():
    return held_back_in_bf16((0, 1)), held_back_in_bf16((0, 0))


def test_what_only_the_last_micro_batch_used_is_reduced_with_what_was_held_back(found):
    """FSDP2 has sums of micro-batches in reduce_dtype, what came last in param_dtype, and refuses to reduce both."""
    for case, heads in enumerate(((0, 1), (0, 0))):
        model = Net().bfloat16()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        expected = [torch.zeros(parameter.shape) for parameter in trained]
        for rank in range(4):
            for i, head in enumerate(heads):
                x = torch.full((4, 24), 1.0 + i + rank, dtype=torch.bfloat16)
                model(x, True, head).square().mean().backward()
                for total, parameter in zip(expected, trained, strict=True):
                    if parameter.grad is not None:
                        total += parameter.grad.float() / 4
                model.zero_grad()
        for of_rank in found["held back"]:
            for mine, its in zip(of_rank[case], expected, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
        assert expected[-1].any() == (heads == (0, 1))


def test_what_needs_no_finding_is_refused(found):
    assert all("requires quantized_gradients" in message for message in found["refused"])
