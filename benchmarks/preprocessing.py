"""How fast tools/preprocess_data.py is beside the tokenizers themselves and beside plain multiprocessing.

    python benchmarks/preprocessing.py speed >> benchmarks/results/preprocessing.jsonl

The text is real: sources of this Python's standard library and of torch. The program takes turns between

* batch: one process that calls the tokenizer's own batch function on texts in memory, in one thread: the measure;
* the tool, from start to exit: read, parse, tokenize, write, with one and two workers;
* plain multiprocessing, with one and two workers: ``pool.imap`` over the lines, one text at a time, lengths in a list.

``efficiency`` is tool / (batch x workers), the median over the turns; what more workers than free cores can't do shows
in ``batch_together``: as many batch processes at once, all their speeds added up. ``cpu_efficiency`` compares processor
seconds, which other programs on the machine disturb less.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, new_parser, origin

from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.text.tokenizers import build_tokenizer

TOKENIZERS = ("SentencePiece", "tokenizers")


def make_corpus(path: Path, max_megabytes: float) -> int:
    """Write sources of this Python and its packages, one file a line; return the bytes of the texts."""
    words = f"examples/quickstart/make_corpus.py --output {path} --max-megabytes {max_megabytes} --packages torch"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return sum(len(text.encode()) for text in read_texts(path, math.inf))


def read_texts(path: Path, max_bytes: float) -> Iterator[str]:
    size = 0
    with open(path, "rb") as file:
        for line in file:
            text = json.loads(line)["text"]
            size += len(text.encode())
            yield text
            if size >= max_bytes:
                return


def make_tokenizers(folder: Path, corpus: Path) -> dict[str, dict[str, Any]]:
    """Trained on the corpus: SentencePiece of 8,192 pieces, byte-level BPE of 32,000."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = folder / "tokenizer.model"
    words = f"tools/train_tokenizer.py --input {corpus} --vocab-size 8192 --max-megabytes 10 --output {model}"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(read_texts(corpus, 10e6), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {
        "SentencePiece": {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)},
        "tokenizers": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")},
    }


def batch_speed(tokenizer: dict[str, Any], corpus: Path, max_bytes: float) -> tuple[float, float]:
    """MB per second and processor seconds per MB of the tokenizer's own batch function."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    built = build_tokenizer(**tokenizer)
    library: Any = getattr(built, "_processor", None) or built._tokenizer  # type: ignore[attr-defined]
    encode = {
        "SentencePieceTokenizer": lambda texts: library.encode(texts, num_threads=1),
        "HuggingFaceTokenizer": lambda texts: [
            e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False)
        ],
    }[tokenizer["tokenizer_type"]]
    texts = list(read_texts(corpus, max_bytes))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    encode(texts[:10])
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), 32):
        encode(texts[first : first + 32])
    return megabytes / (time.perf_counter() - wall), (time.process_time() - cpu) / megabytes


_plain: Any


def _start_plain(tokenizer: dict[str, Any]) -> None:
    global _plain
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _plain = build_tokenizer(**tokenizer)


def _encode_plain(line: bytes) -> list[int]:
    return [*_plain.tokenize(json.loads(line)["text"]), _plain.eod]


def run_plain(tokenizer: dict[str, Any], corpus: Path, prefix: Path, workers: int) -> None:
    """The plain multiprocessing version: lines dealt out one by one in chunks of 32, lengths kept until the end."""
    lengths = []
    with open(corpus, "rb") as lines, open(f"{prefix}.bin", "wb") as tokens:
        with multiprocessing.get_context("spawn").Pool(workers, _start_plain, (tokenizer,)) as pool:
            for ids in pool.imap(_encode_plain, lines, chunksize=32):
                tokens.write(np.array(ids, np.uint16).tobytes())
                lengths.append(len(ids))
    with IndexedDatasetWriter(f"{prefix}_index", np.uint16) as writer:
        writer.add_documents(np.fromfile(f"{prefix}.bin", np.uint16), lengths, [1] * len(lengths))


def tool_command(tokenizer: dict[str, Any], corpus: Path, prefix: Path, workers: int) -> list[str]:
    flags = [word for name, value in tokenizer.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = f"tools/preprocess_data.py --input {corpus} --output-prefix {prefix} --append-eod --workers {workers}"
    return [sys.executable, *words.split(), "--log-interval", "1000000", *flags]


def watched(command: list[str]) -> dict[str, float]:
    """Wall and processor seconds of a command with its children."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    return {"seconds": time.perf_counter() - began, "cpu": usage.ru_utime + usage.ru_stime}


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    corpus = folder / "corpus.jsonl"
    megabytes = make_corpus(corpus, args.megabytes) / 1e6
    tokenizers = make_tokenizers(folder, corpus)
    for name in args.tokenizers:
        rows: dict[int, list[dict[str, float]]] = {workers: [] for workers in args.workers}
        for _ in range(args.rounds):
            for workers in args.workers:
                rows[workers].append(measure_turn(folder, corpus, megabytes, tokenizers[name], workers))
        for workers, turns in rows.items():
            yield {"tokenizer": name, "workers": workers, "corpus_mb": round(megabytes, 1)} | summary(workers, turns)


def measure_turn(
    folder: Path, corpus: Path, megabytes: float, tokenizer: dict[str, Any], workers: int
) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    batch_arguments = (tokenizer, corpus, megabytes * 1e6 / 8)  # enough for a batch measurement
    with spawn.Pool(workers) as pool:
        before = pool.apply(batch_speed, batch_arguments)
        together = pool.starmap(batch_speed, [batch_arguments] * workers, chunksize=1)
    tool = watched(tool_command(tokenizer, corpus, folder / "tool", workers))
    with spawn.Pool(1) as pool:  # on both sides of the tool's run: the machine's speed drifts
        after = pool.apply(batch_speed, batch_arguments)
    batch, batch_cpu = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    plain_arguments = [json.dumps(tokenizer), str(corpus), str(folder / "plain"), str(workers)]
    plain = watched([sys.executable, __file__, "plain", *plain_arguments])
    ours, theirs = (IndexedDataset(folder / prefix) for prefix in ("tool_text_document", "plain_index"))
    our_tokens, their_tokens = (np.fromfile(dataset.token_path, ours.dtype) for dataset in (ours, theirs))
    if not (
        np.array_equal(ours.sequence_lengths, theirs.sequence_lengths) and np.array_equal(our_tokens, their_tokens)
    ):
        raise RuntimeError(f"{tokenizer}: the tool's tokens are not those of plain multiprocessing")
    return {
        "batch_mb_s": batch,
        "batch_together_mb_s": sum(speed for speed, _ in together),
        "tool_mb_s": megabytes / tool["seconds"],
        "plain_mb_s": megabytes / plain["seconds"],
        "cpu_efficiency": batch_cpu * megabytes / tool["cpu"],
        "plain_cpu_efficiency": batch_cpu * megabytes / plain["cpu"],
    }


def summary(workers: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the turns; efficiency: the tool's speed over that of as many batch processes."""
    for turn in turns:
        turn["efficiency"] = turn["tool_mb_s"] / (turn["batch_mb_s"] * workers)
        turn["efficiency_beside_batch_together"] = turn["tool_mb_s"] / turn["batch_together_mb_s"]
    medians = {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}
    of_each_turn = [round(turn["efficiency"], 3) for turn in turns]
    return {**medians, "efficiency_of_each_turn": of_each_turn, "load_of_machine": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=("speed",))
    parser.add_argument("--megabytes", type=float, default=60.0, metavar="N", help="size of the corpus; default 60")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="default 1 2")
    parser.add_argument("--tokenizers", nargs="+", choices=TOKENIZERS, default=TOKENIZERS, help="default all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns; default 3")
    args = parser.parse_args()
    versions = {name: version(name) for name in ("sentencepiece", "tokenizers")}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, Path(folder)):
            print(json.dumps(origin() | versions | row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:  # a process of the measurement
        run_plain(json.loads(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
