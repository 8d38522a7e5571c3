"""Data files of megatron-core's own writer are read here, and ours by its reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

# Documents of one to three sequences.
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10], [11], [12, 13]], [[65000, 14]]]
SEQUENCES = [sequence for document in DOCUMENTS for sequence in document]
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core misses Transformer Engine and Apex


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_theirs_are_read_here(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        tokens = torch.tensor([token for sequence in document for token in sequence])
        builder.add_document(tokens, [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    ours = IndexedDataset(prefix)
    assert [ours[i].tolist() for i in range(len(ours))] == SEQUENCES
    assert ours.num_documents == len(DOCUMENTS) and ours[0].dtype == dtype


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("mmap", [True, False])
def test_ours_are_read_there(tmp_path, dtype, mmap):
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirDataset

    prefix = str(tmp_path / "ours")
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    theirs = TheirDataset(prefix, mmap=mmap)
    assert [theirs[i].tolist() for i in range(len(theirs))] == SEQUENCES
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, DOCUMENTS)]).tolist()
    assert theirs.get(3, offset=1, length=2).tolist() == DOCUMENTS[2][0][1:3]
