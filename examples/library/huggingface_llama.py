"""ZeRO++ and LoCo under a Hugging Face Llama: torchrun --nproc-per-node 4 examples/library/huggingface_llama.py

Needs the package transformers. The model is made from a configuration; nothing is downloaded.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp

dist.init_process_group()
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    use_cache=False,
)
model = LlamaForCausalLM(shape)
model.to(device)  # type: ignore[arg-type]

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
config = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig())
zeropp = apply_zeropp(model, config)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(20):
    tokens = torch.arange(64).repeat(4, 1) + torch.randint(900, (4, 1))  # counting on from a random number
    loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sent = zeropp.traffic.take()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}, rank 0 sent {sent.inter_node / 1e6:.3f} MB to other nodes")
dist.destroy_process_group()
