"""Data through the whole program: masks, fill-in-the-middle and orders, resumed and lengthened."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.text.tokenizers import NullTokenizer
from tests.ranks import free_port, run_ranks
from tests.training.small_run import NO_DROPOUT, call_pretrain, flags

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# 1030 samples of 32 tokens an epoch, which are 8 steps and a bit. NullTokenizer has ids to spare.
RUN = (
    f"{NO_DROPOUT} --split 1 --eval-iters 0 --micro-batch-size 32 --global-batch-size 128 "
    "--tokenizer-type NullTokenizer --vocab-size 300"
)


def write_data(prefix: Path, skip: int = 0) -> None:
    """The golden dataset a, but for its last documents, with NullTokenizer's end of document."""
    a = IndexedDataset(GOLDEN / "a")
    with IndexedDatasetWriter(prefix, a.dtype) as writer:
        for i in range(len(a) - skip):
            writer.add_document([np.where(a[i] == 256, NullTokenizer(300).eod, a[i])])


def run(folder: Path, *more: str, ranks: int = 1, length: int = 4) -> tuple[int, list[str], str]:
    """Exit code, the losses as printed, and stderr."""
    argv = flags(str(folder / "x"), RUN, *more, length=f"--train-iters {length}")
    codes, outs, errs = zip(*(answers[0] for answers in run_ranks(ranks, call_pretrain, argv)), strict=True)
    return codes[0], re.findall(r"lm loss: (\S+)", outs[-1]), errs[0]


@pytest.mark.parametrize(
    "more",
    [
        "--reset-position-ids --reset-attention-mask --eod-mask-loss",
        "--fim-data --fim-prefix-token 290 --fim-middle-token 291 --fim-suffix-token 292",
        "--dataloader-type cyclic --no-mmap-bin-files",
        "--data-order-stable",
    ],
)
def test_resumed_run_goes_on_with_the_same_batches(tmp_path, more):
    write_data(tmp_path / "x")
    plain = run(tmp_path, length=6)
    whole = run(tmp_path, more, length=6)
    assert (plain[0], whole[0]) == (0, 0), plain[2] + whole[2]
    assert len(whole[1]) == 6
    if more != "--data-order-stable":  # whose first epoch is Megatron's
        assert whole[1] != plain[1]
    save = f"--save {tmp_path}/saved --save-interval 3 --lr-decay-iters 6"
    assert run(tmp_path, more, save, "--exit-interval 3", length=6)[1] == whole[1][:3]
    resumed = run(tmp_path, more, save, f"--load {tmp_path}/saved", length=6)
    assert resumed[1] == whole[1][3:], resumed[2]


def test_run_lengthened_past_an_epoch_is_refused_or_mapped(tmp_path):
    write_data(tmp_path / "x")
    save = f"--save {tmp_path}/saved --save-interval 3 --lr-decay-style constant"
    assert run(tmp_path, save, length=3)[0] == 0
    load = f"{save} --load {tmp_path}/saved --override-data"
    code, losses, error = run(tmp_path, load, length=9)  # 1152 samples
    assert (code, losses) == (2, [])
    assert "--data-order-stable" in error
    assert "2 epochs of the training data, not 1" in error
    code, losses, error = run(tmp_path, load, "--data-order-stable", length=9)
    assert (code, len(losses)) == (0, 6), error
    assert losses == run(tmp_path, "--data-order-stable --lr-decay-style constant", length=9)[1][3:]


def train_on_a_node_of_its_own(folder: str, port: int) -> tuple[int, str, str]:
    """Each rank finds its data in a folder of its own, as on nodes without a common file system."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    prefix = Path(folder) / f"node{dist.get_rank()}" / "x"
    return call_pretrain(flags(str(prefix), RUN, length="--train-iters 1"))[0]


@pytest.mark.parametrize("missing_documents", [0, 1])
def test_nodes_without_a_common_file_system(tmp_path, missing_documents):
    write_data(tmp_path / "node0" / "x")
    write_data(tmp_path / "node1" / "x", skip=missing_documents)
    (code, _, error), (other_code, out, _) = run_ranks(2, train_on_a_node_of_its_own, str(tmp_path), free_port())
    if missing_documents:
        assert (code, other_code) == (2, 2)
        assert "ranks 1 read other data than rank 0" in error
    else:
        assert (code, other_code) == (0, 0)
        assert "lm loss" in out
        for node in ("node0", "node1"):
            assert list((tmp_path / node / "index_cache").glob("x-train-*/shuffle_index.npy"))
