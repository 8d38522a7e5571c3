"""ZeRO++ and LoCo under a plain PyTorch model: torchrun --nproc-per-node 4 examples/library/plain_pytorch.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp

MICRO_BATCHES = 2

dist.init_process_group()
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)  # the same weights on every rank, before they are sharded
model = nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)))
model.to(device)

for layer in model:
    fully_shard(layer)
fully_shard(model)
config = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig())
zeropp = apply_zeropp(model, config)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if rank == 0:
    print(zeropp.describe())
torch.manual_seed(rank)  # other data on every rank
for step in range(12):
    for i in range(MICRO_BATCHES):
        zeropp.set_is_last_micro_batch(i == MICRO_BATCHES - 1)  # only that one crosses nodes
        x = torch.randn(8, 16, 128, device=device)
        loss = (model(x) - x.flip(1)).square().mean()
        (loss / MICRO_BATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
    sent = zeropp.traffic.take()
    if rank == 0 and step % 3 == 2:
        print(f"step {step + 1}: loss {loss.item():.4f}, rank 0 sent {sent.inter_node / 1e6:.3f} MB to other nodes")
dist.destroy_process_group()
