"""Fine-tunes a pretrained model with weights in 16, 8, 6, 4 and 2 bits: how few are enough?

    python benchmarks/finetuning_bits.py  # pretrains a Llama once, then fine-tunes what has no row yet

The base is a Llama of 1.6 million parameters: pretrained on torch's sources by ZeRO-3's numerics, exported to Hugging
Face's format, and imported from there. It is fine-tuned on sympy's sources, 4 local ranks as 2
nodes, as ``examples/zeropp/finetune.sh`` does: weights through hpZ, gradients in 8 bits on both hops.
"""

import math
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, markdown_table, measure_once, new_parser, read_rows, run_measured, run_trainer
from study import make_text
from study_arms import BF16, CPU, LLAMA, NODES, RANKS
from study_experiments import BF16_WIRE, gradients, moves, weights
from study_tables import difference

PATH = RESULTS / "finetuning_bits.jsonl"
FOLDER = Path("runs/finetuning_bits")
SEEDS, STEPS = (1, 2, 3), 200
PROGRAM, VALIDATION = "pretrain_llama.py", "lm loss validation"
EIGHT_BITS = gradients(8, 8)
WIRES = {
    "16 bits (ZeRO-3)": BF16_WIRE.flags,
    **{f"{bits} bits": f"{weights(bits, 256)} {EIGHT_BITS}" for bits in (8, 6, 4, 2)},
    **{f"{bits} bits, moved codes": f"{BF16} {moves(bits)} {EIGHT_BITS}" for bits in (8, 6, 4)},
}
MODEL = (
    f"{CPU.shape} {LLAMA} --attention-dropout 0 --hidden-dropout 0 --micro-batch-size {CPU.micro_batch_size} "
    f"--adam-beta2 {CPU.adam_beta2} --weight-decay 0.1 --lr-decay-style cosine --num-workers 0 --eval-iters 64 "
    f"--log-interval 20 --local-ranks {RANKS} --local-nodes {NODES}"
)


def pretrain(text: str) -> tuple[Path, float]:
    """Return the folder of the base's checkpoint, and its loss on the text that it will be tuned on."""
    base, checkpoint = FOLDER / "pretrained", FOLDER / "base"
    if not checkpoint.exists():
        flags = (
            f"{MODEL} {BF16_WIRE.flags} --train-iters {CPU.train_iters} --eval-interval {CPU.train_iters} "
            f"--lr {CPU.lr} --min-lr {CPU.lr / 10} --lr-warmup-fraction 0.1 --save {base} --overwrite-save --seed 1 "
            f"--save-interval {CPU.train_iters}"
        )
        run_trainer(f"{flags} {make_text('cpu', CPU)}", ranks=None, program=PROGRAM)
        run("tools/export_hf.py", "--load", base, "--output", FOLDER / "hf")
        run("tools/import_hf.py", "--input", FOLDER / "hf", "--save", checkpoint)
    flags = f"{MODEL} {BF16_WIRE.flags} --load {checkpoint} --finetune --skip-train --train-iters 1 --lr 1 {text}"
    return checkpoint, run_measured(flags, ranks=None, program=PROGRAM).last(VALIDATION)


def make_tuning_text() -> str:
    corpus, prefix = FOLDER / "sympy.jsonl", FOLDER / "sympy"
    pretraining_text = make_text("cpu", CPU)
    tokenizer = pretraining_text[pretraining_text.index("--tokenizer-type") :]
    if not Path(f"{prefix}_text_document.idx").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        run("examples/quickstart/make_corpus.py", "--packages", "sympy", "--max-megabytes", 8, "--output", corpus)
        files = f"--input {corpus} --output-prefix {prefix} --append-eod {tokenizer}"
        run("tools/preprocess_data.py", *files.split())
    return f"--data-path {prefix}_text_document --split 90,10,0 {tokenizer}"


def run(program: str, *words: object) -> None:
    subprocess.run([sys.executable, str(ROOT / program), *map(str, words)], check=True)


def tune(checkpoint: Path, text: str, wire: str, seed: int) -> dict[str, Any]:
    flags = (
        f"{MODEL} {wire} --load {checkpoint} --finetune --train-iters {STEPS} --eval-interval {STEPS} --lr 3e-4 "
        f"--min-lr 3e-5 --lr-warmup-fraction 0.05 --seed {seed} {text}"
    )
    loss = run_measured(flags, ranks=None, program=PROGRAM).last(VALIDATION)
    if math.isnan(loss):
        raise RuntimeError(f"no validation loss: {flags}")
    return {"validation_loss": loss, "command": f"{PROGRAM} {flags}"}


def table() -> str:
    """Perplexity by the bits of frozen weights."""
    rows = read_rows(PATH)
    losses = {(row["wire"], row["seed"]): row["validation_loss"] for row in rows if "wire" in row}
    (before,) = (math.exp(row["validation_loss"]) for row in rows if row.get("what") == "before")
    lines: list[list[object]] = [["before", f"{before:.2f}", "", ""]]
    for name in WIRES:
        found = [seed for seed in SEEDS if (name, seed) in losses and (next(iter(WIRES)), seed) in losses]
        if found:
            perplexity = statistics.fmean(math.exp(losses[name, seed]) for seed in found)
            more = [100 * math.expm1(losses[name, seed] - losses[next(iter(WIRES)), seed]) for seed in found]
            lines.append([name, f"{perplexity:.2f}", difference(more), len(found)])
    return markdown_table(["weights", "perplexity", "over 16 bits", "seeds"], lines)


def main() -> None:
    new_parser(__doc__).parse_args()
    text = make_tuning_text()
    checkpoint, loss = pretrain(text)
    measure_once(PATH, {"what": "before"}, lambda: {"validation_loss": loss})
    for seed in SEEDS:
        for name, wire in WIRES.items():
            measure_once(PATH, {"wire": name, "seed": seed}, partial(tune, checkpoint, text, wire, seed))
    print(table())


if __name__ == "__main__":
    main()
