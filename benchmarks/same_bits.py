"""Does a change of the code change a bit of what is trained? Runs of every layout in two checkouts, compared.

    git worktree add ../before COMMIT && make -C ../before .venv/.ready
    .venv/bin/python benchmarks/same_bits.py --before ../before

Each run trains a small model for a few steps in both checkouts and saves twice. Equal are: all tensors of the last
checkpoint (parameters, optimizer, LoCo's errors, weight copies, random states), and those of a run that goes on in this
checkout from the other one's first checkpoint. Where real ranks are emulated too, both end with the same parameters in
this checkout. Then come the quickstart and the scripts of the published experiments, at laptop scale.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, new_parser, run_trainer

from megatron_zpp.checkpoint import iterate_parameters, read_meta

STEPS, SAVE_INTERVAL = 6, 3
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    f"--global-batch-size 16 --train-iters {STEPS} --save-interval {SAVE_INTERVAL} --lr 1e-2 "
    "--lr-warmup-iters 2 --eval-iters 1 --log-interval 1 --mock-data --vocab-size 500 "
    "--distributed-backend gloo --no-async-save"
)
ZEROPP = (
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-loco "
    "--zero-weight-block-size 64 --zero-gradient-block-size 32"
)
ON_NODES_OF_1 = ZEROPP.replace("size 2", "size 1")
TWO_BITS = "--zero-gradient-bits 2 --zero-gradient-scaling absmax --zero-gradient-element-scales"
ISLANDS = "--islands 2 --island-sync-interval 2 --island-bits 4 --island-loco --island-block-size 32"
MUON = "--optimizer muon --muon-period 2"
EMULATED = "--emulate-ranks 4 --emulate-nodes 2"
RUNS = {  # name: trainer and flags; 4 ranks, or one that emulates them
    "ZeRO-0": "gpt --zero-stage 0",
    "ZeRO-1": "gpt --zero-stage 1",
    "ZeRO-2, bf16": "gpt --zero-stage 2 --bf16",
    "ZeRO-3": "gpt --zero-ranks-per-node 2",
    "ZeRO++ with LoCo, bf16": f"gpt {ZEROPP} --bf16",
    "ZeRO++ with LoCo, fp16": f"llama {ZEROPP} --fp16 --initial-loss-scale 65536",
    "both hops, Hadamard, stochastic": f"gpt {ZEROPP} --zeropp-loco-hops both --zero-hadamard "
    "--zero-gradient-rounding stochastic",
    "ZeRO-1 with qgZ": "gpt --zero-stage 1 --zero-quantized-gradients --zero-ranks-per-node 2 --zeropp-loco",
    "4 nodes of 1": "gpt --zero-quantized-gradients --zero-ranks-per-node 1 --zeropp-loco",
    "tp 2": f"gpt --tensor-model-parallel-size 2 {ON_NODES_OF_1}",
    "tp 2, sequence parallel": "llama --tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2": "gpt --pipeline-model-parallel-size 2",
    "pp 2, interleaved": "llama --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "cp 2": "gpt --context-parallel-size 2 --reset-attention-mask --reset-position-ids",
    "cp 2, ZeRO++": f"llama --context-parallel-size 2 {ON_NODES_OF_1}",
    "pp 2, zero-bubble": "gpt --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    "2-bit recipe": f"gpt {ZEROPP} {TWO_BITS}",
    "experts, EP 2": f"llama --num-experts 4 --expert-model-parallel-size 2 {ZEROPP}",
    "Muon": f"llama {MUON} {ZEROPP}",
    "2 islands": f"gpt {ISLANDS} {ON_NODES_OF_1} --zero-ranks-per-node 1",
    "2 islands in fragments": f"gpt {ISLANDS} --island-fragments 2 --island-sync-delay 1 --zero-ranks-per-node 2",
    "emulated 2 x 2": f"gpt {EMULATED} {ZEROPP}",
    "emulated 2 x 2, bf16": f"llama {EMULATED} {ZEROPP} --bf16",
    "emulated Muon": f"llama {EMULATED} {MUON} {ZEROPP}",
    "emulated 2 islands": f"gpt --emulate-ranks 4 --emulate-nodes 4 {ISLANDS} --zero-quantized-gradients",
}
PUBLISHED = sorted(path for folder in ("zeropp", "loco") for path in (ROOT / "examples" / folder).glob("*.sh"))
SCRIPTS = {  # name: variables
    "quickstart/run.sh": {"MEGABYTES": "1", "VOCAB_SIZE": "500", "TRAIN_ITERS": "6"},
    **{f"{path.parent.name}/{path.name}": {} for path in PUBLISHED},
}
REAL_AND_EMULATED = {  # name: flags of both; the latter runs in one process
    "ZeRO++ with LoCo": ("gpt", ZEROPP),
    "moved codes": ("gpt", f"{ZEROPP} --zeropp-weight-moves --zero-weight-bits 6"),
    "Muon": ("llama", f"{MUON} {ZEROPP}"),
}


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout, with its .venv")
    parser.add_argument("--flags", default="", help="flags for every run, such as '--clip-grad 0'")
    parser.add_argument("--only", default="", metavar="NAME", help="only the runs whose name contains this")
    args = parser.parse_args()
    before, differ = args.before.resolve(), 0

    def report(name: str, num_tensors: int, **verdicts: str) -> None:
        nonlocal differ
        differ += any(verdict != "equal" for verdict in verdicts.values())
        found = "   ".join(f"{what}: {verdict}" for what, verdict in verdicts.items())
        print(f"{name:34} {num_tensors:4} tensors   {found}", flush=True)

    for name, words in RUNS.items():
        if args.only not in name:
            continue
        (trainer, _, flags), ranks = words.partition(" "), 1 if "--emulate-ranks" in words else 4
        with tempfile.TemporaryDirectory() as scratch:
            old, new, resumed = (Path(scratch) / part for part in ("old", "new", "resumed"))
            command = f"{COMMON} {flags} {args.flags}"
            train(before, ranks, trainer, f"{command} --save {old}")
            train(ROOT, ranks, trainer, f"{command} --save {new}")
            train(ROOT, ranks, trainer, f"{command} --save {resumed} --load {old} --ckpt-step {SAVE_INTERVAL}")
            expected = digests(old)
            trained, goes_on = (verdict(expected, digests(folder)) for folder in (new, resumed))
        report(name, len(expected), trained=trained, resumed=goes_on)
    for name, (trainer, flags) in REAL_AND_EMULATED.items():
        if args.only not in f"{name}, real and emulated":
            continue
        with tempfile.TemporaryDirectory() as scratch:
            real, emulated = Path(scratch) / "real", Path(scratch) / "emulated"
            train(ROOT, 4, trainer, f"{COMMON} {flags} {args.flags} --save {real}")
            train(ROOT, 1, trainer, f"{COMMON} {flags} {args.flags} {EMULATED} --save {emulated}")
            expected = parameters(real)
            report(f"{name}, real and emulated", len(expected), trained=verdict(expected, parameters(emulated)))
    for name, variables in SCRIPTS.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            old, new = Path(scratch) / "old", Path(scratch) / "new"
            for checkout, out in ((before, old), (ROOT, new)):
                run_script(checkout, f"examples/{name}", variables | {"OUT": str(out), "CORPUS": f"{scratch}/corpus"})
            expected = digests(old)
            report(name, len(expected), trained=verdict(expected, digests(new)))
    return int(differ > 0)


def run_script(checkout: Path, script: str, variables: dict[str, str]) -> None:
    path = f"{checkout / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SCALE": "laptop", "PYTHONPATH": str(checkout)} | variables
    saves = [] if script.endswith("quickstart/run.sh") else ["--save-interval", "5"]
    if script.endswith("gpt_18b.sh"):  # which times steps, and saves nothing
        saves += ["--save", f"{variables['OUT']}/checkpoints"]
    done = subprocess.run([f"./{script}", *saves], cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{checkout}: {script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def train(checkout: Path, ranks: int, trainer: str, flags: str) -> None:
    python = str(checkout / ".venv" / "bin" / "python")
    run_trainer(flags, ranks, f"pretrain_{trainer}.py", root=checkout, cwd=checkout, python=python)


def digests(save: Path) -> dict[str, str]:
    """SHA-256 of every part of a tensor in each last checkpoint below ``save``, by name.

    Not by file: of a tensor that several ranks hold alike, DCP picks one to save it, a resumed run maybe another.
    """
    found: dict[str, list[str]] = {}
    trackers = sorted(save.rglob("latest_checkpointed_iteration.txt"))
    assert trackers, f"nothing was saved in {save}"
    for tracker in trackers:
        for file in (tracker.parent / f"iter_{int(tracker.read_text()):07d}").glob("*.safetensors"):
            data = file.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, part in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    begin, end = part["data_offsets"]
                    content = f"{part['dtype']}{part['shape']}".encode() + data[start + begin : start + end]
                    key = f"{tracker.parent.relative_to(save)}: {name}"
                    found.setdefault(key, []).append(hashlib.sha256(content).hexdigest())
    return {name: " ".join(sorted(parts)) for name, parts in found.items()}


def parameters(save: Path) -> dict[str, str]:
    """SHA-256 of the model's whole parameters in the last checkpoint, however many ranks saved it."""
    checkpoint = save / f"iter_{STEPS:07d}"
    tensors = iterate_parameters(checkpoint, read_meta(checkpoint))
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors}


def verdict(expected: dict[str, str], found: dict[str, str]) -> str:
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return f"{len(wrong)} DIFFER, such as {wrong[0]}" if wrong else "equal"


if __name__ == "__main__":
    sys.exit(main())
