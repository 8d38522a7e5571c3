"""How fast are a dataset's indices built, and in how much memory?

    .venv/bin/python benchmarks/data_indices.py

Every measurement runs in a process of its own, whose largest memory is reported (``imports_mb``: what it held before).
Beside ours stands the reference: Megatron's published rules as one would first write them, a Python loop over
documents. Both must give the same bytes. It needs Linux, and two gigabytes of disk: the dataset, a billion random
tokens in a million documents, is made in ``--folder`` and stays there.

``cpu_seconds`` tell what a machine of its own would take where others compute too (``load_average`` above 1).
Prints JSON lines; ``benchmarks/results/data_indices.jsonl`` holds those of the machine that they name.
"""

import hashlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import new_parser, origin
from numpy.typing import NDArray

from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

SEQ_LENGTH, SEED = 1024, 1234
Indices = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # of documents, samples and the samples' order


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", default="runs/benchmarks", help="where the dataset is made")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of about 1,000 tokens each")
    args = parser.parse_args()
    prefix = str(Path(args.folder) / f"random-{args.documents}")
    make_dataset(prefix, args.documents)
    IndexedDataset(prefix).token_range()  # into the page cache
    for build in (index_by_reference, index, index_from_cache):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            result = process.submit(measured, build, prefix).result()
        name = build.__name__.replace("_", " ")
        print(json.dumps({"measurement": name, **result, **origin()}), flush=True)


def measured(build: Callable[[str], Indices], prefix: str) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # a process begins with its parent's peak: forget it
    before = peak_megabytes()
    if build is index_from_cache:
        index_from_cache(prefix)
    clock, cpu = time.perf_counter(), time.process_time()
    indices = build(prefix)
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    hashed = hashlib.sha256()
    for array in indices:
        hashed.update(np.ascontiguousarray(array).data)
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "samples": len(indices[-1]),
        "sha256": hashed.hexdigest()[:16],
        "peak_mb": peak_megabytes(),
        "imports_mb": before,
    }


def peak_megabytes() -> int:
    """The largest resident memory of this process, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 // 1_000_000


def make_dataset(prefix: str, documents: int) -> None:
    if Path(f"{prefix}.idx").exists():
        return
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for first in range(0, documents, 10_000):
            lengths = random.integers(1, 2000, size=min(10_000, documents - first))
            tokens = random.integers(0, 50_000, size=lengths.sum(), dtype=np.uint16)
            writer.add_documents(tokens, lengths, np.ones(len(lengths), dtype=int))


def index_by_reference(prefix: str) -> Indices:
    """Walk over the documents, sample by sample, as Megatron's helper does."""
    lengths = IndexedDataset(prefix).sequence_lengths
    random = np.random.RandomState(SEED)
    document_index = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(document_index)
    num_samples = (int(lengths.sum(dtype=np.int64)) - 1) // SEQ_LENGTH
    sample_index = np.zeros((num_samples + 1, 2), dtype=np.int32)
    lengths_in_order = lengths[document_index].tolist()
    row = offset = 0
    for k in range(1, num_samples + 1):
        remaining = SEQ_LENGTH + 1
        while remaining:
            length = lengths_in_order[row] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1  # the last token is the next sample's first
                remaining = 0
            else:
                row, offset = row + 1, 0
        sample_index[k] = row, offset
    shuffle_index = np.arange(num_samples, dtype=np.uint32)
    random.shuffle(shuffle_index)
    return document_index, sample_index, shuffle_index


def index(prefix: str) -> Indices:
    with tempfile.TemporaryDirectory(dir=Path(prefix).parent) as folder:
        return index_from_cache(prefix, folder)


def index_from_cache(prefix: str, folder: str | None = None) -> Indices:
    options = SampleOptions(SEQ_LENGTH, SEED)
    split = build_datasets(options, data_path=[prefix], split="1", num_samples=(None, 0, 0), cache_path=folder)
    assert isinstance(split.train, GPTDataset)
    return split.train.document_index, split.train.sample_index, split.train.shuffle_index


if __name__ == "__main__":
    main()
