"""Islands of FSDP2 ranks that synchronize now and then: torchrun --nproc-per-node 4 examples/library/islands.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import IslandConfig, apply_islands

ISLANDS, INTERVAL = 2, 5

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size() // ISLANDS
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (ISLANDS, size), mesh_dim_names=("island", "shard"))
torch.manual_seed(0)  # the same weights on every rank, before they are sharded
model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)))
model.to(device)

for layer in model:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
islands = apply_islands(model, optimizer, IslandConfig(INTERVAL, bits=4, loco=True), mesh["island"])
if rank == 0:
    print(islands.describe())
torch.manual_seed(rank)  # other data on every rank
for step in range(20):
    x = torch.randn(32, 16, 256, device=device)
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % INTERVAL == INTERVAL - 1:
        sent = islands.traffic.take().inter_island
        print(f"step {step + 1}: loss {loss.item():.4f}, rank 0 sent {sent / 1e6:.3f} MB to the other island")
islands.conclude()  # outer_parameters() have all steps in them now
dist.destroy_process_group()
