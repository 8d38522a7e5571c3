"""One elastic island: a job that may die and return.

    torchrun --nproc-per-node 2 examples/library/elastic_islands.py ISLAND NUM_ISLANDS HOST:PORT SECRET_FILE

Each island is a job like this, on any machine. HOST:PORT is the address of megatron-zpp lighthouse, SECRET_FILE is
shared by it and all islands. Kill an island, and the others go on; start it again, and it returns.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig
from megatron_zpp.islands.elastic import ElasticIslands, Membership

INTERVAL, STEPS = 5, 40
island, num_islands = map(int, sys.argv[1:3])
lighthouse, secret_file = sys.argv[3:]

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)))
model.to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
membership = Membership(island, num_islands, lighthouse, secret_file)
islands = ElasticIslands(model, optimizer, IslandConfig(INTERVAL, bits=4, loco=True), membership)
islands.join()
while islands.steps < STEPS:  # not a count of one's own: an island that was away continues where the others are
    torch.manual_seed((islands.steps * num_islands + island) * size + rank)  # other data at each step of each rank
    x = torch.randn(32, 16, 256, device=device)
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and islands.steps % INTERVAL == 0:
        sent = islands.traffic.take().inter_island
        print(
            f"island {island} of {islands.num_islands}, step {islands.steps}: loss {loss.item():.4f}, "
            f"rank 0 sent {sent / 1e6:.3f} MB to other islands",
            flush=True,
        )
islands.leave()
dist.destroy_process_group()
