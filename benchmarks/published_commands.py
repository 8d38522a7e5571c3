"""How many published training commands train here, made small: two steps of each, with every flag of theirs.

    python benchmarks/published_commands.py COMMANDS.json --output trained.jsonl

COMMANDS.json is ``{name: [words of the command behind pretrain_gpt.py]}``. Sizes, paths, lengths, intervals and the
number of ranks become small (see ``small``), and without a GPU the backend becomes gloo; no flag is left out. Each row
of the output says what became of a command: its first losses, or the error. Rows that are there are not run again.
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, append_row, new_parser, read_rows

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands.pretrain import pretrain
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.families import GPT
from megatron_zpp.metrics.history import METRICS, read_run

PARALLEL = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "expert-tensor-parallel-size", "num-distributed-optimizer-instances"),
)
# What a flag becomes if the command has it. Layers, ranks, patterns and paths: see ``small``.
SIZES = {
    "hidden-size": 32, "ffn-hidden-size": 64, "num-attention-heads": 4, "num-query-groups": 2, "kv-channels": 8,
    "seq-length": 32, "max-position-embeddings": 32, "vocab-size": 500, "make-vocab-size-divisible-by": 32,
    "padded-vocab-size": 512, "num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 16,
    "moe-shared-expert-intermediate-size": 16, "moe-router-num-groups": 2, "moe-router-group-topk": 1,
    "q-lora-rank": 16, "kv-lora-rank": 16, "qk-head-dim": 8, "qk-pos-emb-head-dim": 4, "v-head-dim": 8,
    "window-size": "8,0", "micro-batch-size": 1, "global-batch-size": 8,
    "eval-micro-batch-size": 1, "num-layers-per-virtual-pipeline-stage": 1, "decoder-first-pipeline-num-layers": 1,
    "decoder-last-pipeline-num-layers": 1, "num-virtual-stages-per-pipeline-rank": 2, "recompute-num-layers": 1,
    "moe-experts-per-layer": 8, "yarn-original-max-position-embeddings": 16,
    # lengths and intervals
    "train-iters": 2, "train-samples": 16, "lr-decay-iters": 2, "lr-decay-samples": 16, "lr-warmup-iters": 1,
    "lr-warmup-samples": 8, "lr-wsd-decay-iters": 1, "eval-iters": 1, "log-interval": 1,
    "save-interval": 2, "save-retain-interval": 2, "exit-interval": 2, "step-batch-size-schedule": "0:4 64:8",
    "rampup-batch-size": "4 4 8",
}  # fmt: skip
ONE_IS_LEFT = {"num-experts", "moe-router-topk", "moe-router-num-groups", "moe-router-group-topk", "num-query-groups"}
LAYERS = (4, 6, 8, 2, 12)  # tried in turn: stages need multiples
TIMEOUT_SECONDS = 900.0


def write_files(folder: Path) -> dict[str, str]:
    """Write data and tokenizers; return {flag that names a path: its new value}."""
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    text = folder / "text.txt"
    text.write_text("\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")))
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(text)], vocab_size=400, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))  # vocab.json, merges.txt
    hf = folder / "hf"
    hf.mkdir()
    bpe.save(str(hf / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(names))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "sp"), vocab_size=400, minloglevel=2, hard_vocab_limit=False
    )
    data = str(folder / "data")
    with IndexedDatasetWriter(data, "<u2") as writer:
        for start in range(4000):  # a thousandth of which is the smallest test split
            writer.add_document([[(start + 7 * i) % 199 for i in range(50)]])
    (folder / "empty").mkdir()
    paths = {f"{split}data-path": data for split in ("", "train-", "valid-", "test-")}
    paths |= {"vocab-file": str(folder / "vocab.json"), "merge-file": str(folder / "merges.txt")}
    paths |= {"load": str(folder / "empty"), "hf": str(hf), "sp": str(folder / "sp.model")}
    return paths


def split_words(words: list[str]) -> dict[str, list[str]]:
    """Return {flag without dashes: its values}; of a flag given twice, the last one counts."""
    flags, last = dict[str, list[str]](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flags[last := name[2:]] = [value] if equals else []
        else:
            flags.setdefault(last, []).append(word)
    return flags


def small(words: list[str], layers: int, files: dict[str, str], output: str) -> list[str]:
    """Append to a command the values that make it small; the last value of a flag counts."""
    flags, more = split_words(words), dict[str, object]({"eval-iters": 1, "num-workers": 0})
    for name in flags:
        if name in SIZES:
            first = flags[name][0] if flags[name] else ""
            stays = first == "0" or (first == "1" and name in ONE_IS_LEFT)
            more[name] = first if stays else SIZES[name]
        elif name in PARALLEL and flags[name] not in ([], ["1"]):
            more[name] = 2
        elif name in ("save", "tensorboard-dir", "data-cache-path"):
            more[name] = f"{output}/{name}"
        elif name in files:
            more[name] = files[name]
        elif name in ("moe-layer-freq", "window-attn-skip-freq", "no-rope-freq") and not "".join(flags[name]).isdigit():
            first_is_dense = re.search("[01]", "".join(flags[name]))
            is_dense = first_is_dense is not None and first_is_dense[0] == "0"
            more[name] = f"[0]*1+[1]*{layers - 1}" if is_dense else f"[1]*{layers}"
    more["num-layers"] = layers
    if "NullTokenizer" in flags.get("tokenizer-type", []):  # whose vocabulary another program may know
        more["vocab-size"] = SIZES["vocab-size"]
    if "tokenizer-model" in flags:
        kind = flags.get("tokenizer-type", [""])[0]
        more["tokenizer-model"] = files["hf" if kind in ("HuggingFaceTokenizer", "HFTokenizer") else "sp"]
    if "distributed-backend" in flags and not os.path.exists("/dev/nvidia0"):
        more["distributed-backend"] = "gloo"
    return [*words, *(word for name, value in more.items() for word in (f"--{name}", *str(value).split(" ")))]


def fit(words: list[str], files: dict[str, str], output: str) -> tuple[int, list[str]]:
    """Return the fewest ranks on which the small command parses, and its words. Raises ValueError if none does."""
    flags = split_words(words)
    ranks = math.prod(2 for name in PARALLEL[:3] if flags.get(name, ["1"]) != ["1"])
    errors = []
    for layers, more in itertools.product(LAYERS, (1, 2, 4)):
        made = small(words, layers, files, output)
        if ranks * more == 1 and "use-distributed-optimizer" in flags:
            continue  # shards of one rank show nothing
        try:
            parse_settings(GPT, made, ranks * more, note=lambda text: None)
            return ranks * more, made
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(errors[0])


def train_all(work: Path, output: Path) -> None:
    """On each rank: train the commands of a file in turn, and append a row for each."""
    for name, words in json.loads(work.read_text()).items():
        folder = work.parent / "metrics" / name  # which holds no other command's losses
        sys.argv = ["pretrain_gpt.py", *words, "--metrics-dir", str(folder)]
        status: Any = 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                pretrain(GPT)
            except SystemExit as exit_:
                status = exit_.code
        is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        row: dict[str, Any] = {"command": name, "ranks": int(os.environ["WORLD_SIZE"])}
        if status and os.environ["RANK"] == "0":
            append_row(output, row | {"trains": False, "error": errors_in(err.getvalue()) or f"status {status}"})
        elif is_last and not status:
            run = read_run(name, folder / METRICS)
            # Every step has a finite loss, also the first ones with fp16, which are skipped for their gradients.
            losses = [loss for key in ("lm loss", "lm loss validation") for loss in run.metrics.get(key, {}).values()]
            trains = bool(losses) and all(map(math.isfinite, losses))
            row |= {"trains": trains, "steps": len(run.samples), "losses": losses}
            append_row(output, row if trains else row | {"error": "no loss, or one that is not finite"})


def errors_in(text: str) -> str:
    """Return the first lines of an error."""
    lines = [line for line in text.splitlines() if re.match(r"(\[rank\d+\]: *)?(error:|[\w.]*Error\b)", line)]
    return " | ".join(dict.fromkeys(lines))[:600]


def run_group(ranks: int, commands: dict[str, list[str]], output: Path, folder: Path) -> None:
    """Train commands on as many ranks, which start again after one that ended them."""
    while commands:
        work, log = folder / "work.json", folder / "log.txt"
        work.write_text(json.dumps(commands))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*torchrun, __file__, str(work), "--output", str(output), "--rank"],
                env=environment, stdout=file, stderr=file, timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
        done = {row["command"] for row in read_rows(output)}
        commands = {name: words for name, words in commands.items() if name not in done}
        if commands:
            name = next(iter(commands))
            error = errors_in(log.read_text()) or "timeout"
            append_row(output, {"command": name, "ranks": ranks, "trains": False, "error": error})
            del commands[name]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("commands", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    parser.add_argument("--rank", action="store_true", help="internal: this process is a rank")
    options = parser.parse_args()
    if options.rank:
        train_all(options.commands, options.output)
        return
    done = {row["command"] for row in read_rows(options.output)}
    groups: dict[int, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_files(folder)
        for number, (command, words) in enumerate(sorted(json.loads(options.commands.read_text()).items())):
            if command in done or options.only not in command:
                continue
            try:
                ranks, made = fit(words, files, f"{name}/{number}")
                groups.setdefault(ranks, {})[command] = made
            except ValueError as error:
                append_row(options.output, {"command": command, "trains": False, "error": str(error)[:600]})
        for ranks, commands in sorted(groups.items()):
            print(f"{len(commands)} commands on {ranks} rank(s)", flush=True)
            run_group(ranks, commands, options.output, folder)
    rows = read_rows(options.output)
    print(f"{sum(row['trains'] for row in rows)} of {len(rows)} commands train")


if __name__ == "__main__":
    main()
