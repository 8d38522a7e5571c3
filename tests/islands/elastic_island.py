"""One elastic island, for torchrun: it trains a small model, and saves the outer state after each synchronization.

    torchrun --nproc-per-node R elastic_island.py FOLDER ISLAND ISLANDS [NAME=VALUE ...]

It ends after step ``end``, or two synchronizations after all islands were there again. After step ``kill`` each rank
kills itself, or between the hops of the synchronization after step ``kill_between``. After each step in ``stop``, such
as 7,10, it waits for a SIGCONT. After step ``hold`` it waits for a file; with ``hold_when_back`` also between the hops
of the first synchronization after it was away. With ``unreachable`` nothing listens where it says that it does.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, hops
from megatron_zpp.islands.elastic import ElasticIslands, Membership
from megatron_zpp.islands.elastic.channel import Listener

INTERVAL = 3
BATCH = 6  # samples of an island in a step
OPTIONS = {
    **dict(bits=0, end=10**6, kill=0, kill_between=0, stop="", hold=0, hold_when_back=0, timeout=20.0),
    **dict(unreachable=0),
    **dict(lighthouse="", secret=""),
}


def build_model(seed: int) -> nn.Sequential:
    """Build a model whose shapes neither 2 ranks nor 2 or 3 islands divide evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 5))


def build_sharded(seed: int, mesh: DeviceMesh | None = None) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = build_model(seed)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)


def batch_of(island: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(100 * step + island))
    return inputs, inputs[:, :5].sin()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, island: int, step: int, rank: int = 0, ranks: int = 1
) -> None:
    inputs, targets = (part.chunk(ranks)[rank] for part in batch_of(island, step))
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def config_of(bits: int) -> IslandConfig:
    return IslandConfig(INTERVAL, bits=bits or None, block_size=16, loco=bits > 0)


def wait_at(place: Path) -> None:
    write(Path(f"{place}.holds"), lambda file: file.write_text(str(os.getpid())))
    while not Path(f"{place}.goes").exists():
        time.sleep(0.02)


def write(file: Path, save: Callable[[Path], object]) -> None:
    """Save under another name first, so that nobody finds half a file."""
    save(file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def between_hops(action: Callable[[], None]) -> None:
    """Do it in each synchronization from now on."""
    encode_mean = hops.IslandHops.encode_mean
    hops.IslandHops.encode_mean = lambda self, received: (action(), encode_mean(self, received))[1]


def main(folder: Path, island: int, num_islands: int, o: SimpleNamespace) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build_sharded(island)  # all start from the first one's
    membership = Membership(island, num_islands, o.lighthouse, o.secret, timeout=o.timeout, patience=100)
    if o.unreachable:
        Listener.address = property(lambda self: ("127.0.0.1", 1), lambda self, address: None)
    islands = ElasticIslands(model, optimizer, config_of(o.bits), membership)

    def save() -> None:
        file = folder / f"{island}.{islands.steps}.outer"
        outer_state = islands.outer_state()
        momentum = [tensor.full_tensor() for key, tensor in outer_state.items() if key.startswith("momentum.")]
        with islands.outer_parameters():
            parameters = [parameter.full_tensor() for parameter in model.parameters()]
        if rank == 0:
            saved = {"parameters": parameters, "momentum": momentum, "islands": islands.num_islands}
            write(file, partial(torch.save, saved))

    islands.join()
    save()
    last, were_fewer = o.end, False
    if islands.steps > 0:
        last = islands.steps + 2 * INTERVAL
    while islands.steps < last:
        step = islands.steps + 1
        if step == o.kill_between:
            between_hops(partial(os.kill, os.getpid(), signal.SIGKILL))
        train_step(model, optimizer, island, step, rank, size)
        if islands.steps % INTERVAL == 0:
            save()
            was_away = islands.steps != step
            if was_away and o.hold_when_back:
                between_hops(partial(wait_at, folder / f"{island}.back"))
            if islands.num_islands < num_islands:
                last, were_fewer = o.end, True
            elif were_fewer or was_away:
                last, were_fewer = islands.steps + 2 * INTERVAL, False
        if step == o.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == o.hold:
            wait_at(folder / f"{island}.{step}")
        if str(step) in o.stop.split(","):
            (folder / f"{island}.{step}.stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    islands.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, island, num_islands, *words = sys.argv[1:]
    given = {name: type(OPTIONS[name])(value) for name, value in (word.split("=", 1) for word in words)}
    main(Path(folder), int(island), int(num_islands), SimpleNamespace(**OPTIONS | given))
