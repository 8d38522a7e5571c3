"""Islands on real ranks, against DiLoCo written down in one process with K copies of a model and torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, apply_islands
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.ranks import run_ranks

BATCH = 6  # samples of an island in a step
STEPS = 8
Inner = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def build_model() -> nn.Sequential:
    """Shapes that neither 2 ranks nor 2 or 4 islands divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 13), nn.Tanh(), nn.Linear(13, 3))


def batch_of(island: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + island)
    return torch.randn(BATCH, 9, generator=generator), torch.randn(BATCH, 3, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def diloco(
    num_islands: int,
    interval: int,
    outer: dict[str, float | bool],
    inner: Inner,
    fragments: int = 1,
    delay: int = 0,
    concluded: bool = False,
) -> nn.Module:
    """The agreed model after STEPS steps. One process, plain loops, and no part of megatron_zpp.

    Layers go round so many fragments; what is agreed on takes so many steps, and half of it is taken over. Where
    training is concluded, it arrives behind the last step; layers that trained since it started are the mean then.
    """
    agreed = build_model()
    numbers = [0, 2, 4]  # the layers that have parameters
    outers = {number: torch.optim.SGD(agreed[number].parameters(), **outer) for number in numbers}
    copies = [copy.deepcopy(agreed) for _ in range(num_islands)]
    optimizers = [inner(model.parameters()) for model in copies]
    to_come: dict[int, list[tuple[int, list[Tensor]]]] = {}
    started: dict[int, int] = {}

    def start(number: int, step: int, arrives: int) -> None:
        own = [[p.detach().clone() for p in model[number].parameters()] for model in copies]
        means = [
            sum(p.detach() - q for q in of_islands) / num_islands
            for p, *of_islands in zip(agreed[number].parameters(), *own, strict=True)
        ]
        to_come.setdefault(arrives, []).append((number, means))
        started[number] = step

    def arrive(number: int, means: list[Tensor]) -> None:
        for parameter, mean in zip(agreed[number].parameters(), means, strict=True):
            parameter.grad = mean
        outers[number].step()
        keep = 0.5 if delay else 0.0
        with torch.no_grad():
            for model in copies:
                for own, parameter in zip(model[number].parameters(), agreed[number].parameters(), strict=True):
                    own.copy_(keep * own + (1 - keep) * parameter)

    for step in range(1, STEPS + 1):
        for island, (model, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, *batch_of(island, step)).backward()
            optimizer.step()
        for number in numbers:
            if (step - number // 2 % fragments * interval // fragments) % interval == 0:
                start(number, step, step + delay)
        for late in to_come.pop(step, []):
            arrive(*late)
    if concluded:
        for late in [late for step in sorted(to_come) for late in to_come[step]]:
            arrive(*late)
        to_come.clear()
        for number in numbers:
            if started.get(number) != STEPS:
                of_copies = zip(*(model[number].parameters() for model in copies), strict=True)
                for parameter, own in zip(agreed[number].parameters(), of_copies, strict=True):
                    parameter.data = sum(p.detach() for p in own) / num_islands
    return agreed


def train(num_islands: int, config: IslandConfig, sharded: bool, inner: Inner, concluded: bool = False) -> list[Tensor]:
    """The agreed parameters, whole, after STEPS steps on this rank's island."""
    size = dist.get_world_size() // num_islands
    mesh = init_device_mesh("cpu", (num_islands, size), mesh_dim_names=("island", "shard"))
    model, zeropp = build_model(), None
    if mesh.get_local_rank("island") > 0:  # islands begin alike all the same
        nn.init.zeros_(model[0].weight)
    if sharded:
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=1, hpz_partition_size=1))
    optimizer = inner(model.parameters())
    islands = apply_islands(model, optimizer, config, mesh["island"], zeropp)
    rows = BATCH // size
    start = rows * mesh.get_local_rank("shard")
    for step in range(1, STEPS + 1):
        inputs, targets = batch_of(mesh.get_local_rank("island"), step)
        optimizer.zero_grad()
        loss_of(model, inputs[start : start + rows], targets[start : start + rows]).backward()
        optimizer.step()
    if concluded:
        islands.conclude()
    with islands.agreed_parameters():
        return [p.full_tensor() if sharded else p.detach().clone() for p in model.parameters()]


def each(*runs: tuple) -> list[list[Tensor]]:
    return [train(*run) for run in runs]


def assert_same(results: list[list[list[Tensor]]], index: int, expected: nn.Module) -> None:
    """On every rank, and training has moved every parameter."""
    for of_rank in results:
        for mine, its, before in zip(of_rank[index], expected.parameters(), build_model().parameters(), strict=True):
            torch.testing.assert_close(mine, its.detach(), rtol=1e-5, atol=2e-6)
            assert not torch.allclose(mine, before, atol=1e-3)


NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN = {"lr": 0.5, "momentum": 0.8}


@pytest.mark.parametrize("num_islands, sharded", [(2, True), (4, False)])
def test_it_is_diloco(num_islands, sharded):
    configs = [IslandConfig(3), IslandConfig(3, "sgd", 0.5, 0.8)]
    results = run_ranks(4, each, *((num_islands, config, sharded, ADAMW) for config in configs))
    for index, outer in enumerate((NESTEROV, PLAIN)):
        assert_same(results, index, diloco(num_islands, 3, outer, ADAMW))


@pytest.mark.parametrize("num_islands, sharded", [(2, True), (4, False)])
def test_it_is_streaming_diloco(num_islands, sharded):
    """Two fragments, a step apart, that arrive two steps later."""
    whole = IslandConfig(3, sync_delay=2, merge_alpha=0.5)
    halves = IslandConfig(3, fragments=2, sync_delay=2, merge_alpha=0.5)
    without_delay = IslandConfig(4, fragments=2)
    results = run_ranks(4, each, *((num_islands, config, sharded, ADAMW) for config in (whole, halves, without_delay)))
    assert_same(results, 0, diloco(num_islands, 3, NESTEROV, ADAMW, delay=2))
    assert_same(results, 1, diloco(num_islands, 3, NESTEROV, ADAMW, fragments=2, delay=2))
    assert_same(results, 2, diloco(num_islands, 4, NESTEROV, ADAMW, fragments=2))


@pytest.mark.parametrize("num_islands, sharded", [(2, True), (4, False)])
def test_the_last_steps_are_agreed_on_where_training_ends(num_islands, sharded):
    """Some fragments are on their way, before or behind their turn; others have arrived, or just started."""
    shapes = [(3, 1, 0), (4, 1, 0), (4, 2, 0), (3, 2, 2), (4, 2, 1), (6, 3, 5)]
    configs = [IslandConfig(h, fragments=f, sync_delay=d, merge_alpha=0.5 if d else 0.0) for h, f, d in shapes]
    results = run_ranks(4, each, *((num_islands, config, sharded, ADAMW, True) for config in configs))
    for index, (interval, fragments, delay) in enumerate(shapes):
        expected = diloco(num_islands, interval, NESTEROV, ADAMW, fragments, delay, concluded=True)
        assert_same(results, index, expected)


def data_parallel(num_islands: int, inner: Inner) -> nn.Module:
    """Plain training on the batches of all islands together."""
    model = build_model()
    optimizer = inner(model.parameters())
    for step in range(1, STEPS + 1):
        batches = [batch_of(island, step) for island in range(num_islands)]
        optimizer.zero_grad()
        loss_of(model, *(torch.cat(tensors) for tensors in zip(*batches, strict=True))).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("num_islands, sharded", [(2, True), (4, False)])
def test_agreeing_on_the_mean_after_each_step_of_sgd_is_data_parallelism(num_islands, sharded):
    sgd = partial(torch.optim.SGD, lr=0.1)
    config = IslandConfig(1, "sgd", outer_lr=1.0, outer_momentum=0.0)
    results = run_ranks(4, each, (num_islands, config, sharded, sgd))
    assert_same(results, 0, data_parallel(num_islands, sgd))
