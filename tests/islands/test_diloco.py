"""Islands on real ranks, against DiLoCo written down in one process with K copies of a model and torch's optimizers."""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, apply_islands
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.ranks import run_in_turn

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


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def diloco(
    num_islands: int,
    interval: int,
    outer: Mapping[str, float | bool],
    inner: Inner = ADAMW,
    fragments: int = 1,
    delay: int = 0,
    concluded: bool = False,
) -> nn.Module:
    """Return the outer model after STEPS steps, computed in plain loops in one process without megatron_zpp.

    Layers belong to ``fragments`` in turn. A synchronization takes ``delay`` steps, and islands then keep half of their
    own parameters. With ``concluded`` it arrives after the last step; layers trained since become the islands' mean.
    """
    shared = build_model()
    layers = [0, 2, 4]  # that have parameters
    outers = {layer: torch.optim.SGD(shared[layer].parameters(), **outer) for layer in layers}
    copies = [copy.deepcopy(shared) for _ in range(num_islands)]
    optimizers = [inner(model.parameters()) for model in copies]
    in_flight: list[tuple[int, int, list[Tensor]]] = []  # when they arrive, the layer, the mean differences
    started: dict[int, int] = {}

    def start(layer: int, step: int) -> None:
        islands = zip(*(model[layer].parameters() for model in copies), strict=True)
        means = [
            sum(p.detach() - own.detach() for own in island) / num_islands
            for p, island in zip(shared[layer].parameters(), islands, strict=True)
        ]
        in_flight.append((step + delay, layer, means))
        started[layer] = step

    def arrive(layer: int, means: list[Tensor]) -> None:
        for parameter, mean in zip(shared[layer].parameters(), means, strict=True):
            parameter.grad = mean
        outers[layer].step()
        keep = 0.5 if delay else 0.0
        with torch.no_grad():
            for model in copies:
                for own, parameter in zip(model[layer].parameters(), shared[layer].parameters(), strict=True):
                    own.copy_(keep * own + (1 - keep) * parameter)

    for step in range(1, STEPS + 1):
        for island, (model, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            train_step(model, optimizer, *batch_of(island, step))
        for layer in layers:
            if (step - layer // 2 % fragments * interval // fragments) % interval == 0:
                start(layer, step)
        while in_flight and in_flight[0][0] <= step:
            arrive(*in_flight.pop(0)[1:])
    if concluded:
        for _, layer, means in in_flight:
            arrive(layer, means)
        for layer in layers:
            if started.get(layer) != STEPS:
                islands = zip(*(model[layer].parameters() for model in copies), strict=True)
                for parameter, own in zip(shared[layer].parameters(), islands, strict=True):
                    parameter.data = sum(p.detach() for p in own) / num_islands
    return shared


def train(
    num_islands: int, config: IslandConfig, sharded: bool, inner: Inner = ADAMW, concluded: bool = False
) -> list[Tensor]:
    """Train this rank's island for STEPS steps; return the whole outer parameters."""
    size = dist.get_world_size() // num_islands
    mesh = init_device_mesh("cpu", (num_islands, size), mesh_dim_names=("island", "shard"))
    model, zeropp = build_model(), None
    if mesh.get_local_rank("island") > 0:  # islands start equal all the same
        nn.init.zeros_(model[0].weight)
    if sharded:
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh["shard"])
        zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=1, hpz_partition_size=1))
    optimizer = inner(model.parameters())
    islands = apply_islands(model, optimizer, config, mesh["island"], zeropp)
    for step in range(1, STEPS + 1):
        batch = batch_of(mesh.get_local_rank("island"), step)
        train_step(model, optimizer, *(part.chunk(size)[mesh.get_local_rank("shard")] for part in batch))
    if concluded:
        islands.conclude()
    with islands.outer_parameters():
        return [p.full_tensor() if sharded else p.detach().clone() for p in model.parameters()]


def data_parallel(num_islands: int, inner: Inner) -> nn.Module:
    """Train plainly on the batches of all islands together."""
    model = build_model()
    optimizer = inner(model.parameters())
    for step in range(1, STEPS + 1):
        batches = zip(*(batch_of(island, step) for island in range(num_islands)), strict=True)
        train_step(model, optimizer, *map(torch.cat, batches))
    return model


NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
SGD = partial(torch.optim.SGD, lr=0.1)
# Interval, fragments and delay. At the last step some fragments are in flight, before or after their second hop; others
# have arrived, or just started.
CONCLUDED = [(3, 1, 0), (4, 1, 0), (4, 2, 0), (3, 2, 2), (4, 2, 1), (6, 3, 5)]


def streaming(interval: int, fragments: int, delay: int) -> IslandConfig:
    return IslandConfig(interval, fragments=fragments, sync_delay=delay, merge_alpha=0.5 if delay else 0.0)


@pytest.mark.parametrize("num_islands, sharded", [(2, True), (4, False)])
def test_it_is_diloco(num_islands, sharded):
    """DiLoCo with either outer optimizer, Streaming DiLoCo, concluded or not; as data parallelism, one mean a step."""
    cases = {
        "nesterov": ((IslandConfig(3),), diloco(num_islands, 3, NESTEROV)),
        "sgd": ((IslandConfig(3, "sgd", 0.5, 0.8),), diloco(num_islands, 3, {"lr": 0.5, "momentum": 0.8})),
        "data parallel": ((IslandConfig(1, "sgd", 1.0, 0.0), SGD), data_parallel(num_islands, SGD)),
    }
    for shape in [(3, 1, 2), (3, 2, 2), (4, 2, 0)] if sharded else [(3, 2, 2)]:
        expected = diloco(num_islands, shape[0], NESTEROV, ADAMW, *shape[1:])
        cases[f"streaming {shape}"] = (streaming(*shape),), expected
    for shape in CONCLUDED[1::2] if sharded else CONCLUDED[::2]:
        expected = diloco(num_islands, shape[0], NESTEROV, ADAMW, *shape[1:], concluded=True)
        cases[f"concluded {shape}"] = (streaming(*shape), ADAMW, True), expected
    calls = {name: partial(train, num_islands, config, sharded, *more) for name, ((config, *more), _) in cases.items()}
    for name, ranks in run_in_turn(4, calls).items():
        for found in ranks:
            for mine, expected, start in zip(
                found, cases[name][1].parameters(), build_model().parameters(), strict=True
            ):
                torch.testing.assert_close(mine, expected.detach(), rtol=1e-5, atol=2e-6, msg=name)
                assert not torch.allclose(mine, start, atol=1e-3), name  # training has moved every parameter


@pytest.mark.parametrize("momentum", [0.9, pytest.param(0.0, marks=pytest.mark.long)])
def test_offload_changes_no_number(momentum):
    settings = {"sync_interval": 3, "outer_momentum": momentum, "bits": 4, "loco": True, "block_size": 16}
    settings |= {"fragments": 2, "sync_delay": 1, "merge_alpha": 0.5}
    configs = {offload: IslandConfig(**settings, offload=offload) for offload in (False, True)}
    runs = run_in_turn(4, {offload: partial(train, 2, config, True) for offload, config in configs.items()})
    for kept, offloaded in zip(runs[False], runs[True], strict=True):
        assert all(map(torch.equal, offloaded, kept))
