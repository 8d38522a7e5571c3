"""What it costs to find weights that a program changed behind autograd's back: checksums' CPU time over a step's.

    python benchmarks/unseen_changes.py > benchmarks/results/unseen_changes.json

A GPT trains on one rank, unsharded; beside each step, the checksums of the shards that a rank of 4 would have are
taken. So both numbers are of one rank, and the step is without its collectives. CPU time, on one thread: it counts
work, not waiting for a shared core.
"""

import json
import statistics
import time
from typing import Any

import torch
from common import origin, seconds_of

from megatron_zpp.models.decoder import Decoder, DecoderConfig
from megatron_zpp.models.init import init_weights
from megatron_zpp.zeropp.gather.unseen_changes import checksum

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB, RANKS, ROUNDS = 4, 512, 8, 256, 4, 4096, 4, 3


def measure() -> dict[str, Any]:
    model = Decoder(DecoderConfig(LAYERS, HIDDEN, HEADS, vocab_size=VOCAB, max_position_embeddings=LENGTH))
    init_weights(model, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH))
    units = [list(layer.parameters()) for layer in model.layers]
    in_layers = {id(parameter) for unit in units for parameter in unit}
    units.append([parameter for parameter in model.parameters() if id(parameter) not in in_layers])
    shards = [torch.randn(sum(p.numel() for p in unit) // RANKS) for unit in units]

    def train() -> None:
        model(tokens, tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate() -> None:
        model(tokens, tokens)

    def checksums() -> None:
        for shard in shards:
            checksum(shard)

    runs, rounds = (train, evaluate, checksums), range(ROUNDS + 1)
    measured = [[seconds_of(run, time.process_time) for run in runs] for _ in rounds][1:]
    train_ms, evaluate_ms, checksums_ms = (1e3 * statistics.median(times) for times in zip(*measured, strict=True))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": BATCH * LENGTH,
        "step_cpu_ms": round(train_ms, 1),
        "evaluation_pass_cpu_ms": round(evaluate_ms, 1),
        "checksums_cpu_ms": round(checksums_ms, 2),
        "percent_of_step": round(100 * checksums_ms / train_ms, 3),
        "percent_of_evaluation_pass": round(100 * checksums_ms / evaluate_ms, 3),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({**origin(), "threads": 1, **measure()}, indent=1))
