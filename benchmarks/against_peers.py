"""One GPT, one loop, one network: FSDP2, HSDP and DeepSpeed beside ``apply_zeropp``, in turns, in the cluster in a box.

    sudo .venv/bin/python benchmarks/against_peers.py run    # makes build/peers with DeepSpeed first
    .venv/bin/python benchmarks/against_peers.py table

All shard the same model of torch's own modules over 2 nodes of 2 ranks, in bf16 with fp32 masters and AdamW. Bytes are
read from the nodes' interfaces. DeepSpeed's qwZ and qgZ do not run on CPUs. gloo sends the gradients of FSDP2's
reduce-scatter twice; "by NCCL" is what a flat ring over the ranks in order would send, by formula.
"""

import itertools
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster_in_a_box import run as run_in_a_box
from common import RESULTS, ROOT, markdown_table, measure_once, read_rows, run_choice
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import apply_zeropp

MEASURED, PEERS = RESULTS / "against_peers.jsonl", ROOT / "build" / "peers"
NODES, RANKS = 2, 2
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 8, 512, 8, 64, 1024
STEPS, WARMUP, TURNS = 8, 3, 2
RATE, CELLS = "1gbit", (1, 4)  # micro-batches of a step
# Bytes that leave a node per parameter and step of n micro-batches, of a flat ring over W = 4 ranks in 16 bit: a gather
# or reduce-scatter takes 2 (W - 1) / W = 1.5, an all-reduce between replicas on two nodes 2.
BY_NCCL = {
    "FSDP2": lambda n: 4.5 * n,
    "DeepSpeed ZeRO-3": lambda n: 4.5 * n,
    "DeepSpeed ZeRO-3, hpZ": lambda n: 3.0 * n + 1.5,  # the first backward pass of a step gathers over all, too
    "HSDP": lambda n: 2.0,
    "FSDP2, weights kept": lambda n: 3.0,
    "HSDP, weights kept": lambda n: 2.0,
}
SETTINGS = [*BY_NCCL, "lossless", "int8", "int6", "int8, weights kept"]


class Layer(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        shape: dict[str, Any] = dict(dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS, **shape) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of tokens [B, S + 1]."""
        x = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train() -> None:
    """One rank: argv is train SETTING MICRO_BATCHES. The last rank prints lines as the trainer does."""
    setting, micro_batches = sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    model = GPT()
    if setting.startswith("DeepSpeed"):
        step = deepspeed_step(model, micro_batches, RANKS if setting.endswith("hpZ") else 1)
    else:
        dist.init_process_group("gloo")
        step = fsdp_step(model, setting)
    torch.manual_seed(dist.get_rank())
    for iteration in range(1, STEPS + 1):
        batches = [torch.randint(VOCABULARY, (1, LENGTH + 1)) for _ in range(micro_batches)]
        start = time.monotonic()
        loss = step(batches)
        seconds = time.monotonic() - start
        if dist.get_rank() == dist.get_world_size() - 1:
            rate = dist.get_world_size() * micro_batches * LENGTH / seconds
            said = f"elapsed time per iteration (ms): {1000 * seconds:.1f} | lm loss: {loss:.6E}"
            print(f" iteration {iteration:8d}/{STEPS:8d} | {said} | tokens per second: {rate:.0f} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def fsdp_step(model: GPT, setting: str) -> Any:
    # The peers also add up whole gradients, and reduce them once.
    mesh, is_peer, (setting, _, kept) = None, setting in BY_NCCL, setting.partition(", weights ")
    if setting == "HSDP":
        mesh = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not is_peer:
        apply_zeropp(model, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batches: list[Tensor]) -> float:
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            model.set_is_last_backward(is_last)  # type: ignore[operator]
            if setting == "HSDP":
                model.set_requires_all_reduce(is_last)  # type: ignore[operator]
            if kept:
                model.set_reshard_after_backward(is_last)  # type: ignore[operator]
                model.set_requires_gradient_sync(is_last or not is_peer)  # type: ignore[operator]
            loss = model(batch)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def deepspeed_step(model: GPT, micro_batches: int, partition: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "zero_hpz_partition_size": partition},
    }
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: list[Tensor]) -> float:
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
        return float(loss)

    return step


def run() -> None:
    """Measure missing rows, in turns; the programs lie in build/peers."""
    python = PEERS / "bin" / "python"
    if Path(sys.prefix) != PEERS:
        if not python.exists():
            venv.create(PEERS, with_pip=True)
            (path,) = (PEERS / "lib").glob("python*/site-packages")
            ours = next(entry for entry in sys.path if entry.endswith("site-packages"))
            (path / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
            subprocess.run([python, "-m", "pip", "install", "--quiet", "deepspeed"], check=True)
        sys.exit(subprocess.run([python, *sys.argv]).returncode)
    os.environ |= {"LOCAL_SIZE": str(RANKS), "TORCH_EXTENSIONS_DIR": str(PEERS / "extensions"), "DS_ACCELERATOR": "cpu"}
    # It compiles an operator at first, for which ranks that start together would wait for ever.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
    build = "import deepspeed; deepspeed.init_distributed('gloo')"
    subprocess.run([python, "-c", build], check=True, env=os.environ | alone)
    for turn, micro_batches in itertools.product(range(TURNS), CELLS):
        for setting in SETTINGS if turn % 2 else reversed(SETTINGS):
            words = [__file__, "train", setting, str(micro_batches)]

            def measured(words: list[str] = words) -> dict[str, Any]:
                found = run_in_a_box(words, NODES, RANKS, RATE, WARMUP, 900, False)
                sent = found.bytes_per_node_and_step / sum(p.numel() for p in GPT().parameters())
                return {"seconds": found.seconds_per_step, "bytes_per_parameter": sent, "loss": found.loss}

            key = {"setting": setting, "rate": RATE, "micro_batches": micro_batches, "turn": turn}
            if row := measure_once(MEASURED, key, measured):
                print(row, flush=True)


def table() -> str:
    """Bytes per parameter and step, and seconds of a step: medians of the turns."""
    rows, lines = read_rows(MEASURED), []
    for setting in (setting for setting in SETTINGS if any(row["setting"] == setting for row in rows)):
        cells = []
        for n in CELLS:
            mine = [row for row in rows if (row["setting"], row["micro_batches"]) == (setting, n)]
            sent = statistics.median(row["bytes_per_parameter"] for row in mine)
            by_nccl = f", {BY_NCCL[setting](n):.1f} by NCCL" if setting in BY_NCCL else ""
            seconds = statistics.median(row["seconds"] for row in mine)
            cells += [f"{sent:.2f}{by_nccl}", f"{seconds:.2f}"]
        name, *more = setting.split(", ", 1)
        lines.append(
            [setting if setting in BY_NCCL else ", ".join([f'`apply_zeropp(model, "{name}")`', *more]), *cells]
        )
    headings = [heading for n in CELLS for heading in (f"bytes, micro-batches {n}", "seconds")]
    return markdown_table(["", *headings], lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train()
    else:
        run_choice(__doc__, {"run": run, "table": lambda: print(table())})
