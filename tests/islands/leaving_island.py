"""One island that may leave, as torchrun starts it: trains a small model, and keeps what it agreed on, each time.

    torchrun --nproc-per-node R leaving_island.py FOLDER ISLAND ISLANDS BITS SIZE STEPS [kill STEP | kill-between STEP]

After STEPS it ends, or two agreements after all islands were there again. ``kill`` ends each rank behind this step by
SIGKILL, ``kill-between`` between the two hops of the agreement behind it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, hops
from megatron_zpp.islands.leaving import apply_leaving_islands
from megatron_zpp.islands.membership import Membership

INTERVAL = 3


def build_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 3))


def batch_of(island: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + island)
    inputs = torch.randn(6, 9, generator=generator)
    return inputs, inputs[:, :3].sin()


def config_of(bits: int) -> IslandConfig:
    return IslandConfig(INTERVAL, bits=bits or None, block_size=16, loco=bits > 0)


def main(folder: Path, island: int, num_islands: int, bits: int, end: int, kill: str = "", at: str = "-1") -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model(island)  # they begin with the first one's
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    membership = Membership(island, num_islands, timeout=20, patience=100)
    islands = apply_leaving_islands(model, optimizer, config_of(bits), membership)

    def keep() -> None:
        with islands.agreed_parameters():
            agreed = [parameter.full_tensor() for parameter in model.parameters()]
        momentum = [tensor.full_tensor() for key, tensor in islands.agreed_state().items() if "momentum" in key]
        if rank == 0:
            kept = {"agreed": agreed, "momentum": momentum, "islands": islands.num_islands}
            torch.save(kept, folder / f"{island}.{islands.steps}.new")
            (folder / f"{island}.{islands.steps}.new").rename(folder / f"{island}.{islands.steps}.pt")

    islands.join()
    keep()
    rows, were_fewer = 6 // size, False
    if islands.steps > 0:
        end = islands.steps + 2 * INTERVAL
    while islands.steps < end:
        step = islands.steps + 1
        inputs, targets = (part[rank * rows : (rank + 1) * rows] for part in batch_of(island, step))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        if kill == "kill-between" and step == int(at):
            hops.IslandHops.add = lambda self, received: os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if islands.steps % INTERVAL == 0:
            keep()
            if were_fewer and islands.num_islands == num_islands:
                end = islands.steps + 2 * INTERVAL
            were_fewer = islands.num_islands < num_islands
        if kill == "kill" and step == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
    islands.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, island, num_islands, bits, end, *kill = sys.argv[1:]
    main(Path(folder), int(island), int(num_islands), int(bits), int(end), *kill)
