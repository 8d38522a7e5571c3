"""How fast are indices built and samples read, and in how much memory?

    .venv/bin/python benchmarks/data_indices.py

Every measurement runs in a process of its own, whose largest memory is reported (``imports_mb``: what it held before).
Beside ours stands the reference: Megatron's published rules as one would first write them, a Python loop over documents
for the sample index, and a sample put together from slices of two memory maps. Both must give the same bytes. It
needs Linux, and two gigabytes of disk: the dataset, a billion random tokens in a million documents,
is made in ``--folder`` and stays there.

``cpu_seconds`` tell what a machine of its own would take where others compute too (``load_average`` above 1).
Prints JSON lines; ``benchmarks/results/data_indices.jsonl`` holds those of the machine that they name.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import new_parser
from numpy.typing import NDArray

from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

SEQ_LENGTH, SEED = 1024, 1234
SAMPLES_READ = 200_000
Result = dict[str, Any]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", default="runs/benchmarks", help="where the dataset is made")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of about 1,000 tokens each")
    args = parser.parse_args()
    prefix = str(Path(args.folder) / f"random-{args.documents}")
    make_dataset(prefix, args.documents)
    IndexedDataset(prefix).token_range()  # into the page cache
    command = " ".join(["python", "benchmarks/data_indices.py", *sys.argv[1:]])
    machine = f"{platform.machine()}, {multiprocessing.cpu_count()} CPUs, Python {platform.python_version()}"
    for measure in (index_by_reference, index, index_from_cache, read_by_reference, read):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            result = process.submit(measured, measure, prefix).result()
        name = measure.__name__.replace("_", " ")
        origin = {"command": command, "machine": machine, "load_average": os.getloadavg()[0]}
        print(json.dumps({"measurement": name, **result, **origin}), flush=True)


def measured(measure: Callable[[str], Result], prefix: str) -> Result:
    # A process begins with its parent's peak: forget it.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_megabytes()
    result = measure(prefix)
    return {**result, "peak_mb": peak_megabytes(), "imports_mb": before}


def peak_megabytes() -> int:
    """The largest resident memory of this process, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 // 1_000_000


class Stopwatch:
    """Seconds on the clock, and of this process on a processor: the time on a machine of its own."""

    def __init__(self) -> None:
        self.clock, self.cpu = time.perf_counter(), time.process_time()

    def taken(self, samples: int) -> Result:
        clock, cpu = time.perf_counter() - self.clock, time.process_time() - self.cpu
        rates = {"samples_per_second": round(samples / clock), "samples_per_cpu_second": round(samples / cpu)}
        return {"samples": samples, "seconds": round(clock, 3), "cpu_seconds": round(cpu, 3), **rates}


def make_dataset(prefix: str, documents: int) -> None:
    if Path(f"{prefix}.idx").exists():
        return
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for first in range(0, documents, 10_000):
            lengths = random.integers(1, 2000, size=min(10_000, documents - first))
            tokens = random.integers(0, 50_000, size=lengths.sum(), dtype=np.uint16)
            writer.add_documents(tokens, lengths, np.ones(len(lengths), dtype=int))


# Building


def reference_sample_index(lengths: list[int], document_index: list[int], num_samples: int) -> NDArray[np.int32]:
    """Walk over the documents, sample by sample, as Megatron's helper does."""
    sample_index = np.zeros((num_samples + 1, 2), dtype=np.int32)
    row = offset = 0
    for k in range(1, num_samples + 1):
        remaining = SEQ_LENGTH + 1
        while remaining:
            length = lengths[document_index[row]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1  # the last token is the next sample's first
                remaining = 0
            else:
                row, offset = row + 1, 0
        sample_index[k] = row, offset
    return sample_index


def index_by_reference(prefix: str) -> Result:
    start = Stopwatch()
    lengths = IndexedDataset(prefix).sequence_lengths
    random = np.random.RandomState(SEED)
    document_index = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(document_index)
    num_samples = (int(lengths.sum(dtype=np.int64)) - 1) // SEQ_LENGTH
    sample_index = reference_sample_index(lengths.tolist(), document_index.tolist(), num_samples)
    shuffle_index = np.arange(num_samples, dtype=np.uint32)
    random.shuffle(shuffle_index)
    return start.taken(num_samples) | {"sha256": digest(document_index, sample_index, shuffle_index)}


def index(prefix: str) -> Result:
    with tempfile.TemporaryDirectory(dir=Path(prefix).parent) as folder:
        return opened(prefix, folder)


def index_from_cache(prefix: str) -> Result:
    open_dataset(prefix)
    return opened(prefix)


def opened(prefix: str, folder: str | None = None) -> Result:
    start = Stopwatch()
    dataset = open_dataset(prefix, folder)
    taken = start.taken(len(dataset))
    return taken | {"sha256": digest(dataset.document_index, dataset.sample_index, dataset.shuffle_index)}


def open_dataset(prefix: str, folder: str | None = None) -> GPTDataset:
    options = SampleOptions(SEQ_LENGTH, SEED)
    split = build_datasets(options, data_path=[prefix], split="1", num_samples=(None, 0, 0), cache_path=folder)
    assert isinstance(split.train, GPTDataset)
    return split.train


def digest(*arrays: NDArray[Any]) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()[:16]


# Reading


def read_by_reference(prefix: str) -> Result:
    """A sample as the rules say it: slices of a memory map, one per document, joined, and turned into tensors."""
    dataset, tokens = open_dataset(prefix), np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    folder = next((Path(prefix).parent / "index_cache").glob(f"{Path(prefix).name}-train-*"))
    arrays = (np.load(folder / f"{name}_index.npy", mmap_mode="r") for name in ("document", "sample", "shuffle"))
    document_index, sample_index, shuffle_index = arrays
    lengths = np.array(dataset.indexed.sequence_lengths)
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def sample(i: int) -> dict[str, torch.Tensor]:
        k = shuffle_index[i]
        (first, offset), (last, end) = sample_index[k], sample_index[k + 1]
        parts = []
        for row in range(first, last + 1):
            document = document_index[row]
            start = begins[document] + (offset if row == first else 0)
            stop = begins[document] + (end + 1 if row == last else lengths[document])
            parts.append(tokens[start:stop])
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        return {"tokens": ids[:-1].contiguous(), "labels": ids[1:].contiguous(), "loss_mask": torch.ones(SEQ_LENGTH)}

    expected = [np.append(batch["tokens"], batch["labels"][-1]) for batch in map(sample, range(100))]
    assert all(np.array_equal(ids, dataset[i]) for i, ids in enumerate(expected))
    return timed_reading(sample, len(dataset))


def read(prefix: str) -> Result:
    dataset = open_dataset(prefix)
    return timed_reading(dataset.__getitem__, len(dataset))


def timed_reading(sample: Callable[[int], Any], length: int) -> Result:
    count = min(SAMPLES_READ, length)
    for i in range(count):  # into the page cache
        sample(i)
    start = Stopwatch()
    for i in range(count):
        sample(i)
    return start.taken(count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
