"""Trains the experiments of docs/evidence/experiments.md: 4 local ranks as 2 nodes, several seeds.

    python benchmarks/study.py run                        # trains what benchmarks/results/study.jsonl lacks
    python benchmarks/study.py run E4 E5 --seeds 1 2      # some of it; --scale gpu: a larger model, for one GPU
    python benchmarks/study.py run E17                    # one seed of a Llama; --scale gpu-llama: of 187M, for one GPU

examples/reproduce.sh --write makes the pages. A killed study goes on where it was. benchmarks/study_experiments.py says
what is trained; the text is 70 MB of Python sources, made on the first run.
"""

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from common import ROOT, append_row, new_parser, read_rows, run_measured
from study_arms import LOG_INTERVAL, NODES, RANKS, SCALES, Arm, Scale
from study_experiments import EXPERIMENTS, OBSERVED, TOKENS_SENT

from megatron_zpp.metrics.history import RunHistory

RESULTS = common.RESULTS / "study.jsonl"
BETWEEN, BETWEEN_ISLANDS = "comm/bytes-between-nodes", "comm/bytes-between-islands"
NODES_FLAG = "--(?:local|emulate)-nodes"  # arms, whose flags name their rows, have the older name


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("command", choices=["run"], help="train what is not in the results yet")
    parser.add_argument("experiments", nargs="*", metavar="E1…E22", help="default: all of the scale")
    parser.add_argument("--match", default="", metavar="REGEX", help="only arms whose name or flags hold it")
    parser.add_argument("--seeds", type=int, nargs="+", help="default as the scale says")
    parser.add_argument("--jobs", type=int, help="runs side by side; default as the scale says")
    parser.add_argument("--scale", choices=SCALES, help="size of model and run; default: the experiments' own")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="of JSON lines")
    args = parser.parse_args()
    if unknown := set(args.experiments) - set(EXPERIMENTS):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}; choose of {', '.join(EXPERIMENTS)}")
    names = args.experiments or [name for name, experiment in EXPERIMENTS.items() if experiment.scale == "cpu"]
    own = {EXPERIMENTS[name].scale for name in names}
    if args.scale is None and len(own) > 1:
        parser.error(f"these experiments have scales of their own ({', '.join(sorted(own))}): run one scale at a time")
    args.scale = args.scale or own.pop()
    if SCALES[args.scale].ranks != RANKS and names != ["E17"]:
        parser.error(f"--scale {args.scale} is for E17: the flags of others are for {RANKS} ranks")
    scale = SCALES[args.scale]
    text = make_text(args.scale, scale)
    done = {(row["flags"], row["seed"]) for row in read_results(args.results, args.scale)}
    chosen = [a for a in arms(names) if re.search(args.match, f"{a.name} {a.flags}")]
    to_do = [(arm, seed) for seed in args.seeds or scale.seeds for arm in chosen]
    to_do = [(arm, seed) for arm, seed in to_do if (arm.flags, seed) not in done]
    print(f"{len(to_do)} runs to do, {len(done)} done", flush=True)
    with ThreadPoolExecutor(args.jobs or scale.jobs) as pool:
        futures = [pool.submit(train, args.results, args.scale, text, arm, seed) for arm, seed in to_do]
        for (arm, seed), future in zip(to_do, futures, strict=True):
            try:
                loss = future.result()["validation_loss"]
            except RuntimeError as error:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"error: {arm.name}, seed {seed}: {error}")
            print(f"{loss:.4f}  seed {seed}  {arm.name}  [{arm.flags}]", flush=True)


def arms(experiments: list[str]) -> list[Arm]:
    """Every arm of these experiments once."""
    found: dict[str, Arm] = {}
    for arm in (arm for name in experiments for group in EXPERIMENTS[name].groups for arm in group.arms):
        found.setdefault(arm.flags, arm)
    return list(found.values())


def make_text(name: str, scale: Scale) -> str:
    """Corpus, tokenizer and tokens under runs/study, made once; the flags that name them."""
    name, folder = scale.text_of or name, Path("runs/study")
    corpus, model, prefix = folder / f"{name}.jsonl", folder / f"{name}.model", folder / name
    commands = {
        corpus: f"examples/quickstart/make_corpus.py --output {corpus} {scale.corpus}",
        model: f"tools/train_tokenizer.py --input {corpus} --vocab-size {scale.vocab_size} --output {model}",
        Path(f"{prefix}_text_document.idx"): f"tools/preprocess_data.py --input {corpus} --output-prefix {prefix} "
        f"--append-eod --tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --workers 2",
    }
    for made, command in commands.items():
        if not made.exists():
            program, *arguments = command.split()
            subprocess.run([sys.executable, str(ROOT / program), *arguments], check=True)
    return (
        f"--data-path {prefix}_text_document --split {scale.split} --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {model}"
    )


def flags_of(scale: Scale, arm: Arm, begun: str = "begun") -> str:
    """Return trainer flags without text and seed. ``begun``: the folder of the checkpoint that the arm goes on from."""
    batch, warmup = scale.micro_batch_size * scale.ranks, max(1, scale.train_iters // 10)
    where = f"--local-ranks {scale.ranks} --local-nodes {NODES}" if arm.real_ranks is None else ""
    half = scale.micro_batch_size // 2
    arm_flags = arm.flags.format(half=half, batch=batch, large=4 * batch, warmup=warmup, begun=begun)
    return (
        f"{scale.shape} {where} --attention-dropout 0 --hidden-dropout 0 "
        f"--micro-batch-size {scale.micro_batch_size} --train-iters {scale.train_iters} "
        f"--eval-iters {scale.eval_iters} --eval-interval {scale.train_iters} --log-interval {LOG_INTERVAL} "
        f"--lr {scale.lr} --min-lr {scale.lr / 10} --lr-decay-style cosine --lr-warmup-fraction 0.1 "
        f"--adam-beta2 {scale.adam_beta2} --weight-decay 0.1 --num-workers 0 {arm_flags}"
    )


def train(results: Path, scale_name: str, text: str, arm: Arm, seed: int) -> dict[str, Any]:
    """One run; its row, which is also appended to the results. Raises RuntimeError when it fails."""
    scale, start, load = SCALES[scale_name], time.monotonic(), round(os.getloadavg()[0], 2)
    steps, sent, losses, commands = 0, 0.0, [], []  # sent: bytes per parameter so far
    launcher = (
        "python" if arm.real_ranks is None else f"torch.distributed.run --standalone --nproc-per-node {arm.real_ranks}"
    )

    def run(flags: str) -> RunHistory:
        threads = max(1, (os.cpu_count() or 1) // (scale.jobs * (arm.real_ranks or scale.ranks)))
        commands.append(f"{launcher} {arm.program} {flags}".replace(begun, "begun"))
        return run_measured(flags, arm.real_ranks, arm.program, threads=threads)

    with tempfile.TemporaryDirectory() as begun:
        if arm.begins is not None:
            steps = round(scale.train_iters * arm.begins_share)
            first = flags_of(scale, Arm("", arm.begins))
            first += f" --save {begun} --save-interval {steps} --exit-interval {steps}"
            beginning = run(f"{first} {text} --seed {seed}")
            sent, losses = steps * bytes_per_parameter(beginning, first), interval_losses(beginning)
        flags = f"{flags_of(scale, arm, begun)} {text} --seed {seed}"
        log = run(flags)
    validation_loss = log.last("lm loss validation")
    if math.isnan(validation_loss):
        raise RuntimeError(f"no validation loss: {commands[-1]}")
    sent += (scale.train_iters - steps) * bytes_per_parameter(log, flags, arm.real_ranks)
    intervals = []  # bytes per parameter in each interval of the log
    if sends_moves(flags):
        parameters = _last_number(NODES_FLAG, flags) * log.settings["num_parameters"]
        intervals = [round(sent / parameters, 4) for sent in log.metrics[BETWEEN].values()]
    observed = {}
    for name in OBSERVED:
        key, factor = ("comm/token-bytes-between-nodes", 1e-6) if name == TOKENS_SENT else (name, 1.0)
        if values := [factor * value for value in log.metrics.get(key, {}).values()]:
            observed[name] = statistics.fmean(values[-max(1, len(values) // 10) :])
    row = {
        "scale": scale_name,
        "flags": arm.flags,
        "seed": seed,
        "num_parameters": log.settings["num_parameters"],
        "validation_loss": validation_loss,
        "bytes_per_parameter": round(sent / scale.train_iters, 4),
        "bytes_of_intervals": intervals,
        "train_losses": losses + interval_losses(log),
        "observed": observed,
        "seconds": round(time.monotonic() - start, 1),
        "command": " && ".join(commands),
        "load": load,
    }
    append_row(results, row)
    return row


def interval_losses(log: RunHistory) -> list[float]:
    """Average the training loss over the steps of each log line, without those whose loss is not finite."""
    ends, means = [*log.metrics["tokens-per-second"]], []
    for before, end in zip([0, *ends], ends, strict=False):
        losses = [loss for i, loss in log.metrics["lm loss"].items() if before < i <= end and math.isfinite(loss)]
        means += [statistics.fmean(losses)] if losses else []
    return means


def bytes_per_parameter(log: RunHistory, flags: str, real_nodes: int | None = None) -> float:
    """That leave a node, or an island, in a step. The log shows what all of them send together."""
    # The last interval has no step that sends weights in full. Islands send in some steps of all.
    nodes = real_nodes or _last_number(NODES_FLAG, flags)
    nbytes = log.last(BETWEEN) / nodes
    if sends_moves(flags):  # fewer and fewer codes move
        nbytes = log.mean(BETWEEN) / nodes
    if between_islands := log.metrics.get(BETWEEN_ISLANDS):
        nbytes += statistics.fmean(between_islands.values()) / _last_number("--islands", flags)
    return nbytes / log.settings["num_parameters"]


def sends_moves(flags: str) -> bool:
    """Whether bytes fall over the run: by the setting, or by a recipe, which all have it but zero3."""
    return "--zeropp-weight-moves" in flags or "--zeropp " in flags


def _last_number(flag: str, flags: str) -> int:
    return int(re.findall(rf"{flag} (\d+)", flags)[-1])


def read_results(results: Path, scale: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(results) if row["scale"] == scale]


if __name__ == "__main__":
    main()
