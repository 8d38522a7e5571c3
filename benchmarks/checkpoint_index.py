"""What reading the index of a checkpoint costs a rank that loads, over the ranks that saved.

python benchmarks/checkpoint_index.py  # 2,169 tensors (Llama 70B and Adam's state), of 16, 256 and 4,096 ranks

Measures, in seconds of the CPU, a rank that needs a shard of each tensor, and rank 0, which checks the whole.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, append_row, markdown_table, new_parser
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_zpp.checkpoint.files import digest
from megatron_zpp.checkpoint.index import SHARDS, read_index

TENSORS, ROWS, COLUMNS = 3 * 723, 8192, 4096


class Part(torch.Tensor):
    """A rank's shard of a tensor, as DCP asks a DTensor for it."""

    part: ChunkStorageMetadata

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.part]


def write_index(folder: Path, ranks: int) -> dict[str, Any]:
    """Write an index of tensors that are divided by rows, as ``build_index`` does; return ``files`` of meta.json."""
    files, length = [f"rank_{rank:05d}.safetensors" for rank in range(ranks)], ROWS // ranks
    number, zero, one = np.arange(ranks), np.zeros(ranks, np.int64), np.ones(ranks, np.int64)
    entries = {}
    with open(folder / SHARDS, "wb") as file:
        for tensor in range(TENSORS):
            first_byte = tensor * length * COLUMNS * 4
            rows = np.stack([number * length, zero, length * one, COLUMNS * one, number, first_byte * one], axis=1)
            entries[f"model.{tensor}"] = {"dtype": "F32", "shape": [ROWS, COLUMNS], "rows": [tensor * rows.size, ranks]}
            file.write(rows.astype("<i8").tobytes())
    text = json.dumps({"files": files, "tensors": entries}).encode()
    (folder / "index.json").write_bytes(text)
    sizes: dict[str, Any] = {name: {"bytes": TENSORS * length * COLUMNS * 4} for name in files}
    shards = {"bytes": (folder / SHARDS).stat().st_size}
    return sizes | {SHARDS: shards, "index.json": {"bytes": len(text), "sha256": digest(text)}}


def measure(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meta = {"files": write_index(folder, ranks)}
        state = {}
        for tensor in range(TENSORS):
            whole = torch.empty(ROWS, COLUMNS, device="meta").as_subclass(Part)
            whole.part = ChunkStorageMetadata(torch.Size([ROWS // ranks, 0]), torch.Size([ROWS // ranks, COLUMNS]))
            state[f"model.{tensor}"] = whole
        begun = time.process_time()
        metadata = read_index(folder, meta, ()).metadata_for(state)
        loaded = time.process_time()
        read_index(folder, meta)
        checked = time.process_time()
        return {
            "ranks": ranks,
            "seconds of a rank": round(loaded - begun, 2),
            "seconds of rank 0": round(checked - loaded, 2),
            "bytes parsed": meta["files"]["index.json"]["bytes"],
            "bytes of rows": meta["files"][SHARDS]["bytes"],
            "shards as objects": len(metadata.storage_data or {}),
            "shards": TENSORS * ranks,
        }


def main() -> None:
    new_parser(__doc__).parse_args()
    rows = [measure(ranks) for ranks in (16, 256, 4096)]
    for row in rows:
        append_row(RESULTS / "checkpoint_index.jsonl", row)
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
