"""Does a change of the code change a bit of what is trained? Runs of every layout in two checkouts, compared.

    git worktree add ../before COMMIT && make -C ../before .venv/.ready
    .venv/bin/python benchmarks/same_bits.py --before ../before

Each run trains a small model for a few steps in both checkouts and saves twice. Equal are: all tensors of the last
checkpoint (parameters, optimizer, LoCo's errors, weight copies, random states), and those of a run that goes on in this
checkout from the other one's first checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
STEPS, SAVE_INTERVAL = 6, 3
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 16 "
    f"--train-iters {STEPS} --save-interval {SAVE_INTERVAL} --lr 1e-2 --lr-warmup-iters 2 --eval-iters 1 "
    "--log-interval 1 --mock-data --vocab-size 500 --distributed-backend gloo --no-async-save"
)
ZEROPP = (
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-loco "
    "--zero-weight-block-size 64 --zero-gradient-block-size 32"
)
DIFFERENCES = "--zero-weight-difference-bits 4 --zero-weight-difference-block-size 64"
RUNS = {  # name: (ranks, trainer, flags)
    "ZeRO-0": (4, "gpt", "--zero-stage 0"),
    "ZeRO-1": (4, "gpt", "--zero-stage 1"),
    "ZeRO-2, bf16": (4, "gpt", "--zero-stage 2 --bf16"),
    "ZeRO-3": (4, "gpt", "--zero-ranks-per-node 2"),
    "ZeRO++ with LoCo, bf16": (4, "gpt", f"{ZEROPP} --bf16"),
    "ZeRO++ with LoCo, fp16": (4, "llama", f"{ZEROPP} --fp16 --initial-loss-scale 65536"),
    "weight differences, LoCo": (4, "llama", f"{ZEROPP} {DIFFERENCES}"),
    "both hops, Hadamard, stochastic": (
        4,
        "gpt",
        f"{ZEROPP} --zeropp-loco-hops both --zero-hadamard --zero-gradient-rounding stochastic",
    ),
    "ZeRO-1 with qgZ": (4, "gpt", "--zero-stage 1 --zero-quantized-gradients --zero-ranks-per-node 2 --zeropp-loco"),
    "4 nodes of 1": (4, "gpt", "--zero-quantized-gradients --zero-ranks-per-node 1 --zeropp-loco"),
    "tp 2": (4, "gpt", f"--tensor-model-parallel-size 2 {ZEROPP.replace('size 2', 'size 1')}"),
    "tp 2, sequence parallel": (4, "llama", "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (4, "gpt", "--pipeline-model-parallel-size 2"),
    "pp 2, interleaved": (
        4,
        "llama",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp 2": (4, "gpt", "--context-parallel-size 2 --reset-attention-mask --reset-position-ids"),
    "emulated 2 x 2": (1, "gpt", f"--emulate-ranks 4 --emulate-nodes 2 {ZEROPP}"),
    "emulated 2 x 2, bf16": (1, "llama", f"--emulate-ranks 4 --emulate-nodes 2 {ZEROPP} {DIFFERENCES} --bf16"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what two checkouts train, bit for bit.", allow_abbrev=False)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout, with its .venv")
    parser.add_argument("--flags", default="", help="flags for every run, such as '--clip-grad 0'")
    parser.add_argument("--only", default="", metavar="NAME", help="only the runs whose name contains this")
    args = parser.parse_args()
    differ = 0
    for name, (ranks, trainer, flags) in RUNS.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            before, after, resumed = (Path(scratch) / part for part in ("before", "after", "resumed"))
            command = f"{COMMON} {flags} {args.flags}"
            train(args.before.resolve(), ranks, trainer, f"{command} --save {before}")
            train(HERE, ranks, trainer, f"{command} --save {after}")
            train(HERE, ranks, trainer, f"{command} --save {resumed} --load {before} --ckpt-step {SAVE_INTERVAL}")
            expected = digests(before)
            verdicts = [verdict(expected, digests(folder)) for folder in (after, resumed)]
        differ += verdicts != ["equal", "equal"]
        print(f"{name:34} {len(expected):4} tensors   trained: {verdicts[0]}   resumed: {verdicts[1]}", flush=True)
    return int(differ > 0)


def train(checkout: Path, ranks: int, trainer: str, flags: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, f"pretrain_{trainer}.py", *flags.split()], cwd=checkout, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{checkout}: pretrain_{trainer}.py {flags}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def digests(save: Path) -> dict[str, str]:
    """SHA-256 of every part of a tensor in the last checkpoint, by file and name."""
    (folder,) = save.glob(f"*{STEPS:07d}")
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, part in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = part["data_offsets"]
                content = f"{part['dtype']}{part['shape']}".encode() + data[start + begin : start + end]
                found[f"{file.name}: {name}"] = hashlib.sha256(content).hexdigest()
    return found


def verdict(expected: dict[str, str], found: dict[str, str]) -> str:
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return f"{len(wrong)} DIFFER, such as {wrong[0]}" if wrong else "equal"


if __name__ == "__main__":
    sys.exit(main())
