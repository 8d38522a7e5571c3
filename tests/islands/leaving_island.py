"""One island that may leave, as torchrun starts it. It trains a small model, and keeps what it agreed on, each time.

    torchrun --nproc-per-node R leaving_island.py FOLDER ISLAND ISLANDS [NAME=VALUE ...]

It ends after ``end`` steps, or two agreements after all islands were there again. ``kill`` ends each rank behind this
step by SIGKILL, ``kill_between`` between the hops of the agreement behind it; behind each step in ``stop``, such as
7,10, it waits for a SIGCONT. Behind ``hold`` it waits for a file; with ``hold_when_back`` also between the hops of the
first agreement after it was away.
``resume`` is the folder of a checkpoint to go on from.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, hops
from megatron_zpp.islands.elastic.leaving import apply_leaving_islands
from megatron_zpp.islands.elastic.membership import Membership

INTERVAL = 3
BATCH = 6  # samples of an island in a step


def build_model(seed: int) -> nn.Sequential:
    """Shapes that neither 2 ranks nor 2 or 3 islands divide evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 5))


def batch_of(island: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(100 * step + island))
    return inputs, inputs[:, :5].sin()


def config_of(bits: int) -> IslandConfig:
    return IslandConfig(INTERVAL, bits=bits or None, block_size=16, loco=bits > 0)


def save(value: object, file: Path) -> None:
    """So that nobody finds half of it."""
    torch.save(value, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def wait_at(place: Path) -> None:
    new = Path(f"{place}.new")
    new.write_text(str(os.getpid()))
    new.rename(f"{place}.holds")
    while not Path(f"{place}.goes").exists():
        time.sleep(0.02)


def between_hops(what: Callable[[], None]) -> None:
    """Do it, from now on in each agreement."""
    add = hops.IslandHops.add
    hops.IslandHops.add = lambda self, received: (what(), add(self, received))[1]


def main(
    folder: Path,
    island: int,
    num_islands: int,
    *,
    bits: str = "0",
    end: str = "1000000",
    kill: str = "0",
    kill_between: str = "0",
    stop: str = "0",
    hold: str = "0",
    hold_when_back: str = "",
    resume: str = "",
    timeout: str = "20",
    lighthouse: str,
    secret: str,
) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model(island)  # they begin with the first one's
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    membership = Membership(island, num_islands, lighthouse, secret, timeout=float(timeout), patience=100)
    islands = apply_leaving_islands(model, optimizer, config_of(int(bits)), membership)

    def whole_state() -> dict[str, torch.Tensor]:
        return {**islands.agreed_state(), **islands.state_dict()}

    if resume:
        dcp.load(state := whole_state(), checkpoint_id=resume)
        islands.load_state_dict(state)

    def keep() -> None:
        mine = folder / f"{island}.{islands.steps}"
        dcp.save(state := whole_state(), checkpoint_id=f"{mine}.state")
        momentum = [tensor.full_tensor() for key, tensor in state.items() if key.startswith("momentum.")]
        with islands.agreed_parameters():
            agreed = [parameter.full_tensor() for parameter in model.parameters()]
        if rank == 0:
            save({"agreed": agreed, "momentum": momentum, "islands": islands.num_islands}, Path(f"{mine}.agreed"))

    islands.join()
    keep()
    last, were_fewer = int(end), False
    if islands.steps > 0 and not resume:
        last = islands.steps + 2 * INTERVAL
    while islands.steps < last:
        step = islands.steps + 1
        inputs, targets = (part.chunk(size)[rank] for part in batch_of(island, step))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        if step == int(kill_between):
            between_hops(partial(os.kill, os.getpid(), signal.SIGKILL))
        optimizer.step()
        if islands.steps % INTERVAL == 0:
            keep()
            was_away = islands.steps != step
            if was_away and hold_when_back:
                between_hops(partial(wait_at, folder / f"{island}.back"))
            if islands.num_islands < num_islands:
                last, were_fewer = int(end), True
            elif were_fewer or was_away:
                last, were_fewer = islands.steps + 2 * INTERVAL, False
        if step == int(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == int(hold):
            wait_at(folder / f"{island}.{step}")
        if str(step) in stop.split(","):
            (folder / f"{island}.{step}.stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    islands.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, island, num_islands, *more = sys.argv[1:]
    main(Path(folder), int(island), int(num_islands), **dict(word.split("=", 1) for word in more))
