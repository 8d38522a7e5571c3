"""LoRA on a Hugging Face Llama under ZeRO++: torchrun --nproc-per-node 4 examples/library/lora.py

Frozen weights cross nodes once. After that only the adapters do, and their gradients in 4 bits. --weight-bits says in
how many bits weights are sent, and ranks keep their copies of them: of the frozen ones, and of the adapters. With --nf4
frozen matrices take 4 bits, as in QLoRA. With --moves only those codes of the adapters are sent that a step moved.

Needs the packages transformers and peft. The model is made from a configuration; nothing is downloaded.
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp

parser = argparse.ArgumentParser()
parser.add_argument("--weight-bits", type=int, choices=[4, 8, 16], default=8)
parser.add_argument("--moves", action="store_true", help="send the codes that moved; with 16 bits the bits")
parser.add_argument("--nf4", action="store_true", help="send and keep frozen matrices in NF4")
arguments = parser.parse_args()
weight_bits = arguments.weight_bits

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    use_cache=False,
)
base = LlamaForCausalLM(shape)
base.to(device)  # type: ignore[arg-type]


def counting(by: int) -> torch.Tensor:
    """Samples that count on from random numbers, in steps of ``by``."""
    return (torch.arange(32) * by + torch.randint(256, (8, 1))).remainder(256).to(device)


# The weights that others would load: a model that counts in ones, the same on every rank.
optimizer = torch.optim.AdamW(base.parameters(), lr=2e-3)
for _ in range(60):
    tokens = counting(by=1)
    base(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in base.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
config = ZeroPPConfig(
    quantized_weights=weight_bits < 16,
    weight_bits=min(weight_bits, 8),
    hpz_partition_size=2,
    frozen_dtype="nf4" if arguments.nf4 else None,
    hpz_secondary_dtype="16bit" if weight_bits == 16 else "int8",
    weight_moves=arguments.moves,
    quantized_gradients=True,
    loco=LoCoConfig(),
)
zeropp = apply_zeropp(model, config)

adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
num_elements = sum(parameter.numel() for parameter in adapters)
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
torch.manual_seed(rank)
for step in range(40):  # now it learns to count in threes
    tokens = counting(by=3)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach() / world_size)
    sent = torch.tensor(zeropp.traffic.take().inter_node, device=device)
    dist.all_reduce(sent)
    if rank == 0 and (step == 0 or step % 10 == 9):
        per_element = sent.item() / num_elements
        print(f"step {step + 1}: loss {loss.item():.4f}, {sent.item()} bytes, {per_element:.3f} per adapter's element")
dist.destroy_process_group()
