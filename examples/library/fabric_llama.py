"""ZeRO++ and LoCo under Lightning Fabric: torchrun --nproc-per-node 4 examples/library/fabric_llama.py

Needs the packages lightning-fabric (or lightning) and transformers. The model is made from a configuration, and trains
on the bytes of README.md; nothing is downloaded.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_zpp.errors import output_folder
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp

MICRO_BATCHES = 2

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=output_folder, default="runs/lightning_fabric")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--resume", type=int, metavar="STEP", help="continue the run that saved this step")
arguments = parser.parse_args()
if arguments.resume is not None and not os.path.isdir(f"{arguments.output}/{arguments.resume}"):
    parser.error(f"--resume {arguments.resume}: {arguments.output} holds no step {arguments.resume}; list the folder")


def parallelize(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


ranks = int(os.environ["WORLD_SIZE"])
strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
fabric = Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
fabric.launch()
fabric.seed_everything(0)
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
model = fabric.setup(LlamaForCausalLM(shape))
config = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig())
zeropp = apply_zeropp(model, config)  # behind fabric.setup, which shards
optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))

output = Path(arguments.output)
if arguments.resume is not None:
    fabric.load(output / str(arguments.resume), {"model": model, "optimizer": optimizer})
    dcp.load({"zeropp": zeropp}, checkpoint_id=output / str(arguments.resume) / "zeropp")
text = torch.frombuffer(bytearray(Path("README.md").read_bytes()), dtype=torch.uint8).long()
samples = text[: text.numel() // 64 * 64].view(-1, 64)
for step in range(arguments.resume or 0, arguments.steps):
    for i in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed((step * MICRO_BATCHES + i) * ranks + fabric.global_rank)
        tokens = samples[torch.randint(len(samples), (2,), generator=generator)].to(fabric.device)
        with fabric.no_backward_sync(model, enabled=i < MICRO_BATCHES - 1):  # only the last crosses nodes
            loss = model(input_ids=tokens, labels=tokens).loss
            fabric.backward(loss / MICRO_BATCHES)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    sent = zeropp.traffic.take()
    fabric.print(f"step {step + 1}: loss {loss.item():.4f}, rank 0 sent {sent.inter_node / 1e6:.3f} MB to other nodes")
    if (step + 1) % (arguments.steps // 2) == 0:
        fabric.save(output / str(step + 1), {"model": model, "optimizer": optimizer})
        # Saved apart: fabric.save would keep rank 0's alone.
        dcp.save({"zeropp": zeropp}, checkpoint_id=output / str(step + 1) / "zeropp")
