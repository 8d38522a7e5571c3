"""Does a change of the code change a bit of what is trained? Trains every layout and recipe in two checkouts.

    git worktree add ../before COMMIT && make -C ../before .venv/.ready
    .venv/bin/python benchmarks/same_bits.py --before ../before

Each run trains a small model for six steps in both checkouts, on four real ranks, and saves twice. All tensors of the
last checkpoint must be equal (parameters, optimizer, LoCo's errors, weight copies, random states), also where a run
goes on in this checkout from the other one's first checkpoint. The program first checks itself: another seed differs.

A checkpoint of another format is refused, so the program writes this checkout's format number into the meta.json of
the other one, and the records of the schedule and of ZeRO++'s settings. ZeRO++'s state is named by a hash of these,
which may be computed otherwise there: it gets the names that the same run gives it here.
"""

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

from common import ROOT, new_parser, run_trainer

from megatron_zpp.zeropp.recipes import RECIPES

STEPS, SAVE_INTERVAL = 6, 3
SETTINGS_OF_STATE = re.compile(r"(\d+\.[^/\"]* ranks, settings )[0-9a-f]{8}/")  # a prefix of names, with their hash
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    f"--global-batch-size 16 --train-iters {STEPS} --save-interval {SAVE_INTERVAL} --lr 1e-2 "
    "--lr-warmup-iters 2 --eval-iters 1 --log-interval 1 --mock-data --vocab-size 500 --no-async-save"
)
ZEROPP = (
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-loco "
    "--zeropp-weight-block-size 64 --zeropp-gradient-block-size 32"
)
ON_NODES_OF_1 = ZEROPP.replace("size 2", "size 1")
ISLANDS = "--islands 2 --island-sync-interval 2 --island-bits 4 --island-loco"
MUON = "--optimizer muon --muon-period 2"
RUNS = {  # name: trainer and flags
    "ZeRO-0": "gpt --zero-stage 0",
    "ZeRO-1": "gpt --zero-stage 1",
    "ZeRO-2, bf16": "gpt --zero-stage 2 --bf16",
    "ZeRO-3": "gpt --zeropp-ranks-per-node 2",
    "qwZ alone": "gpt --zero-quantized-weights --zeropp-ranks-per-node 2",
    "hpZ alone": "gpt --zero-hpz-partition-size 2",
    "ZeRO++ with LoCo, bf16": f"gpt {ZEROPP} --bf16",
    "ZeRO++ with LoCo, fp16": f"llama {ZEROPP} --fp16 --initial-loss-scale 65536",
    **{name: f"llama --zeropp {name} --zeropp-ranks-per-node 2 --bf16" for name in list(RECIPES)[1:]},
    "int8, 4 nodes of 1": "gpt --zeropp int8 --zeropp-ranks-per-node 1",
    "both hops, stochastic": f"gpt {ZEROPP} --zeropp-loco-hops both --zeropp-gradient-rounding stochastic",
    "2 bits, scales of elements": f"gpt {ZEROPP} --zeropp-gradient-bits 2 --zeropp-gradient-scaling absmax "
    "--zeropp-gradient-element-scales",
    "ZeRO-1 with qgZ": "gpt --zero-stage 1 --zero-quantized-gradients --zeropp-ranks-per-node 2 --zeropp-loco",
    "4 nodes of 1": "gpt --zero-quantized-gradients --zeropp-ranks-per-node 1 --zeropp-loco",
    "least memory": f"gpt {ZEROPP} --zeropp-weight-moves --zeropp-gradient-sum-dtype int8 --zeropp-offload sums",
    "tp 2": f"gpt --tensor-model-parallel-size 2 {ON_NODES_OF_1}",
    "tp 2, sequence parallel": "llama --tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2": "gpt --pipeline-model-parallel-size 2",
    "pp 2, int8": "llama --pipeline-model-parallel-size 2 --zeropp int8 --zeropp-ranks-per-node 1",
    "pp 2, interleaved": "llama --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "pp 2, zero-bubble": "gpt --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    "cp 2": "gpt --context-parallel-size 2 --reset-attention-mask --reset-position-ids",
    "cp 2, ZeRO++": f"llama --context-parallel-size 2 {ON_NODES_OF_1}",
    "experts, ep 2": f"llama --num-experts 4 --expert-model-parallel-size 2 {ZEROPP}",
    "Muon": f"llama {MUON} {ZEROPP}",
    "recomputation": f"gpt {ZEROPP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "2 islands": f"gpt {ISLANDS} {ON_NODES_OF_1} --zeropp-ranks-per-node 1",
    "2 islands in fragments": f"gpt {ISLANDS} --island-fragments 2 --island-sync-delay 1 --zeropp-ranks-per-node 2",
}


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout, with its .venv")
    parser.add_argument("--only", default="", metavar="NAME", help="only the runs whose name contains this")
    args = parser.parse_args()
    before, num_different = args.before.resolve(), 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / seed for seed in ("1", "2")]
        for folder in folders:
            train(ROOT, "gpt", f"{COMMON} --seed {folder.name} --save {folder}")
        if digests(folders[0]) == digests(folders[1]):
            sys.exit("error: runs of two seeds end with the same bits, so this program compares nothing")
    for name, words in RUNS.items():
        if args.only not in name:
            continue
        trainer, _, flags = words.partition(" ")
        with tempfile.TemporaryDirectory() as scratch:
            old, new, resumed = (Path(scratch) / part for part in ("old", "new", "resumed"))
            train(before, trainer, f"{COMMON} {flags} --save {old}")
            train(ROOT, trainer, f"{COMMON} {flags} --save {new}")
            saved, ours = (folder / f"iter_{SAVE_INTERVAL:07d}" for folder in (old, new))
            formats = {json.loads((folder / "meta.json").read_text())["format"] for folder in (saved, ours)}
            if len(formats) == 1:
                as_saved_here(saved, ours)
                train(ROOT, trainer, f"{COMMON} {flags} --save {resumed} --load {old} --ckpt-step {SAVE_INTERVAL}")
            expected = digests(old)
            verdicts = [compare(expected, digests(new))]
            verdicts.append(compare(expected, digests(resumed)) if len(formats) == 1 else "not tried: another format")
        num_different += any(verdict not in ("equal", "not tried: another format") for verdict in verdicts)
        print(f"{name:34} {len(expected):4} tensors   trained: {verdicts[0]}   resumed: {verdicts[1]}", flush=True)
    return int(num_different > 0)


def train(checkout: Path, trainer: str, flags: str) -> None:
    python = str(checkout / ".venv" / "bin" / "python")
    run_trainer(flags, 4, f"pretrain_{trainer}.py", root=checkout, cwd=checkout, python=python)


def as_saved_here(there: Path, here: Path) -> None:
    """Give a checkpoint of the other checkout the names of ZeRO++'s state of one from here."""
    names = {match[1]: match[0] for match in SETTINGS_OF_STATE.finditer((here / "index.json").read_text())}
    text = (there / "index.json").read_text()
    text = SETTINGS_OF_STATE.sub(lambda match: names.get(match[1], match[0]), text)
    (there / "index.json").write_text(text)
    meta, ours = (json.loads((folder / "meta.json").read_text()) for folder in (there, here))
    meta["files"]["index.json"] |= {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    text = json.dumps(meta | {name: ours[name] for name in ("zeropp", "schedule")})
    (there / "meta.json").write_text(text)
    (there / "complete").write_text(hashlib.sha256(text.encode()).hexdigest())


def digests(save: Path) -> dict[str, str]:
    """Return the SHA-256 of every part of a tensor in the last checkpoint in ``save``, by name.

    Files are not compared, because DCP picks one of several ranks to save what all hold, and a resume may pick another.
    """
    found: dict[str, list[str]] = {}
    for file in (save / f"iter_{STEPS:07d}").glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, part in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = part["data_offsets"]
                content = f"{part['dtype']}{part['shape']}".encode() + data[start + begin : start + end]
                found.setdefault(SETTINGS_OF_STATE.sub(r"\1", name), []).append(hashlib.sha256(content).hexdigest())
    if not found:
        raise RuntimeError(f"nothing was saved in {save}")
    return {name: " ".join(sorted(parts)) for name, parts in found.items()}


def compare(expected: dict[str, str], found: dict[str, str]) -> str:
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return f"{len(wrong)} DIFFER, such as {wrong[0]}" if wrong else "equal"


if __name__ == "__main__":
    sys.exit(main())
