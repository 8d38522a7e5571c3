"""Small datasets: those in golden/, and those that a test writes and reads."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

GOLDEN = Path(__file__).parent / "golden"
BYTES = [bytes([byte]) for byte in range(256)]
A, B = str(GOLDEN / "a"), str(GOLDEN / "b")


def write(prefix: str | Path, documents: Sequence, dtype: str = "<u2") -> Path:
    """Write documents, each a list of sequences."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return Path(prefix)


def read(prefix: str | Path) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [[dataset[s].tolist() for s in range(*ends[d : d + 2])] for d in range(dataset.num_documents)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Content of all files but the input."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.jsonl"}


def write_ranks(path: Path, tokens: Iterable[bytes]) -> str:
    """Write a .tiktoken file."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(path)
