"""With find_unused_parameters, what no rank used has no gradient, and what some used the mean over all.

The oracle is one process that adds up the gradients of all ranks' micro-batches.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.emulation import emulate_zeropp
from tests.ranks import run_ranks
from tests.zeropp.fsdp_model import needs_unused_switch

EXACT = ZeroPPConfig(hpz_partition_size=2, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None)
LOCO = ZeroPPConfig(True, 2, True, LoCoConfig(), weight_block_size=32, gradient_block_size=32)
MICRO_BATCHES = 2


class Net(nn.Module):
    """A layer that is its own unit and is dropped at times, by all ranks alike; two heads, and a frozen matrix."""

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


def shard(config=None, **options):
    model = Net()
    fully_shard(model.layer)
    fully_shard(model)
    return model, apply_zeropp(model, config, **options) if config is not None else None


def on_real_ranks(config, finds=True):
    model, zeropp = shard(config, find_unused_parameters=finds)
    optimizer, has_gradient, traffic = optimizer_of(model), [], []
    for step in range(5):
        if step == 3:  # a step that is given up leaves no trace
            zeropp.set_is_last_micro_batch(False)
            loss_of(model, 0, 1, dist.get_rank()).backward()
            zeropp.undo_step()
            model.zero_grad()
        for i in range(MICRO_BATCHES):
            zeropp.set_is_last_micro_batch(i == MICRO_BATCHES - 1)
            loss_of(model, step, i, dist.get_rank()).backward()
        has_gradient.append(finish_step(model, optimizer))
        traffic.append(zeropp.traffic.take())
    return has_gradient, [p.full_tensor().detach() for p in model.parameters()], traffic


def emulated(config):
    model = Net()
    emulation = emulate_zeropp(model, config, 2, 2, units=[model.layer], find_unused_parameters=True)
    optimizer, has_gradient, traffic = optimizer_of(model), [], []
    for step in range(5):
        for i in range(MICRO_BATCHES):
            emulation.set_is_last_micro_batch(i == MICRO_BATCHES - 1)
            for rank, as_rank in enumerate(emulation.ranks):
                with as_rank:
                    loss_of(model, step, i, rank).backward()
        has_gradient.append(finish_step(model, optimizer))
        traffic.append(emulation.traffic.take())
    return has_gradient, [p.detach() for p in model.parameters()], traffic


def of_plain_fsdp2():
    """Who has a gradient after steps in which all ranks used the same."""
    model, _ = shard()
    optimizer, has_gradient = optimizer_of(model), []
    for step in (0, 1, 4):
        for i in range(MICRO_BATCHES):
            loss_of(model, step, i, dist.get_rank()).backward()
        has_gradient.append(finish_step(model, optimizer))
    return has_gradient


def _all():
    return on_real_ranks(EXACT), on_real_ranks(EXACT, finds=False), on_real_ranks(LOCO), of_plain_fsdp2()


@needs_unused_switch
def test_unused_parameters_are_as_in_one_process():
    has_gradient, expected = in_one_process()
    assert [row.count(False) for row in has_gradient] == [1, 5, 3, 1, 5]  # the frozen one; a layer or a head is two
    results = run_ranks(4, _all)
    for (exact, parameters, _), (told_nothing, _, _), _, plain in results:
        assert exact == has_gradient
        assert told_nothing != has_gradient
        assert plain == [has_gradient[step] for step in (0, 1, 4)]
        for ours, one_process in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, one_process, rtol=1e-4, atol=1e-5)
    of_emulation, parameters, traffic = emulated(LOCO)
    assert of_emulation == has_gradient
    for _, _, (real, real_parameters, _), _ in results:
        assert real == has_gradient
        assert all(mine.equal(its) for mine, its in zip(parameters, real_parameters, strict=True))
    # Emulated ranks gather every unit in every pass, so only a step that uses all of them sends the same.
    assert traffic[0].inter_node == sum(loco[2][0].inter_node for _, _, loco, _ in results)


def held_back_in_bf16(heads):
    """Gradients in fp32 of two micro-batches, of which the first is held back on each rank, through these heads."""
    model, policy = Net(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    apply_zeropp(model, EXACT)
    for i, head in enumerate(heads):
        model.set_requires_gradient_sync(i == len(heads) - 1)
        x = torch.full((4, 24), 1.0 + i + dist.get_rank())
        model(x, True, head).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.requires_grad]


def _held_back_in_bf16():
    return held_back_in_bf16((0, 1)), held_back_in_bf16((0, 0))


@needs_unused_switch
def test_what_only_the_last_micro_batch_used_is_reduced_with_what_was_held_back():
    """FSDP2 has sums of micro-batches in reduce_dtype, what came last in param_dtype, and refuses to reduce both."""
    results = run_ranks(4, _held_back_in_bf16)
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
        for of_rank in results:
            for mine, its in zip(of_rank[case], expected, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
        assert expected[-1].any() == (heads == (0, 1))


def test_what_needs_no_finding_is_refused():
    with pytest.raises(ValueError, match="requires quantized_gradients"):
        emulate_zeropp(nn.Linear(8, 8), ZeroPPConfig(hpz_partition_size=2), 2, 2, find_unused_parameters=True)
