"""Data through the whole program: masks and orders, resumed and lengthened."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.commands.convert.import_hf import tokenizer_words
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.text.tokenizers import NullTokenizer
from tests.convert.hf.test_tokenizer import KINDS
from tests.data.small_data import BYTES, write_ranks
from tests.ranks import free_port, run_ranks
from tests.training.small_run import NO_DROPOUT, call_pretrain, flags

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# 1030 samples of 32 tokens an epoch, which are 8 steps and a bit. NullTokenizer has ids to spare.
RUN = (
    f"{NO_DROPOUT} --split 1 --eval-iters 0 --micro-batch-size 32 --global-batch-size 128 "
    "--tokenizer-type NullTokenizer --vocab-size 300"
)


def write_data(prefix: Path, skip: int = 0, eod: int = NullTokenizer(300).eod) -> None:
    """The golden dataset a, but for its last documents, with another end of document."""
    a = IndexedDataset(GOLDEN / "a")
    with IndexedDatasetWriter(prefix, a.dtype) as writer:
        for i in range(len(a) - skip):
            writer.add_document([np.where(a[i] == 256, eod, a[i])])


def run(folder: Path, *runs: str) -> list[tuple[int, list[str], str, str]]:
    """Exit code, the losses as printed, stderr and stdout of each run."""
    argvs = [flags(str(folder / "x"), RUN, more) for more in runs]
    return [
        (code, re.findall(r"lm loss: (\S+)", out), err, out)
        for code, out, err in run_ranks(1, call_pretrain, *argvs)[0]
    ]


ORDERS = ["--reset-position-ids --reset-attention-mask --eod-mask-loss", "--dataloader-type cyclic --no-mmap-bin-files"]


def test_resumed_run_goes_on_with_the_same_batches(tmp_path):
    write_data(tmp_path / "x")
    small = "--train-iters 4 --global-batch-size 32"
    runs = [small]
    for number, more in enumerate(ORDERS):
        save = f"{small} {more} --save {tmp_path}/{number} --save-interval 2"
        runs += [f"{small} {more}", f"{save} --exit-interval 2", f"{save} --load {tmp_path}/{number}"]
    (code, plain, error, _), *results = run(tmp_path, *runs)
    assert code == 0, error
    for number, more in enumerate(ORDERS):
        (_, whole, error, _), (_, begun, *_), (_, resumed, resumed_error, _) = results[3 * number : 3 * number + 3]
        assert len(whole) == 4, error
        assert whole != plain, more
        assert begun == whole[:2] and resumed == whole[2:], more + resumed_error


def test_what_a_refused_change_of_length_names_works(tmp_path):
    """Three epochs: another length would shuffle other data together."""
    write_data(tmp_path / "x")
    save = f"--save {tmp_path}/saved --save-interval 3 --lr-decay-style constant --data-cache-path {tmp_path}/cache"
    again = f"{save} --load {tmp_path}/saved"
    begun, refused, shorter, longer = run(
        tmp_path,
        f"{save} --train-iters 20 --exit-interval 3",
        f"{again} --train-iters 9",
        f"{again} --train-iters 20 --exit-interval 5",
        f"{again} --train-iters 30 --override-data --exit-interval 7",
    )
    assert begun[0] == 0 and refused[:2] == (2, [])
    remedy = (
        "To end earlier, keep the length and give --exit-interval; to go on in a new order, which repeats some data, "
    )
    assert f"{remedy}give --override-data\n" in refused[2]
    assert [(code, len(losses)) for code, losses, *_ in (shorter, longer)] == [(0, 2), (0, 2)]


def test_a_run_says_how_often_it_reads_its_data_and_warns_above_four_times(tmp_path):
    write_data(tmp_path / "x")
    write_data(tmp_path / "y", skip=170)
    blend = f"--data-path 1 {tmp_path}/x 3 {tmp_path}/y"
    cases = ["--train-iters 3", "--train-iters 34 --exit-interval 1", f"--train-iters 3 {blend}", "--mock-data"]
    cases = [flags(str(tmp_path / "x"), f"{RUN} --train-iters 3", case) for case in cases]
    for flag in ("--data-path", "--split"):
        at = cases[3].index(flag)
        del cases[3][at : at + 2]
    once, often, blended, mock = (out for _, out, _ in run_ranks(1, call_pretrain, *cases)[0])
    assert "  train: 12,288 tokens in 384 samples, 0.373 epochs\n" in once and "WARNING" not in once
    assert "  train: 139,264 tokens in 4,352 samples, 4.22 epochs\n" in often
    assert f"WARNING: {tmp_path}/x is read 4.22 times, and data teach little after 4 epochs" in often
    assert re.search(r"384 samples, 0\.0932 to (\S+) epochs\n", blended), blended
    assert "  train: 12,288 tokens in 384 samples\n" in mock


def test_other_tokens_under_the_same_index_and_another_tokenizer_of_the_same_size_are_refused(tmp_path):
    write_data(tmp_path / "x", eod=256)
    ranks = write_ranks(tmp_path / "ranks", BYTES)
    save = f"--tokenizer-type TikTokenizer --tiktoken-pattern gpt2 --tokenizer-model {ranks} --save {tmp_path}/saved"
    save = f"{save} --save-interval 1"
    begun, *_ = run(tmp_path, f"{save} --exit-interval 1")
    assert begun[0] == 0, begun[2]
    tokens = np.fromfile(tmp_path / "x.bin", IndexedDataset(tmp_path / "x").dtype)
    np.roll(tokens, 1).tofile(tmp_path / "x.bin")
    write_ranks(tmp_path / "ranks", BYTES[::-1])
    more = f"{save} --load {tmp_path}/saved"
    refused, goes_on = run(tmp_path, more, f"{more} --override-data")
    assert refused[:2] == (2, []) and goes_on[0] == 0, (refused, goes_on[2])
    assert "is not the file of the checkpoint's tokenizer" in refused[2] and "--override-data" in refused[2]
    assert "the run goes on at sample 128 of the new order, and reads none before it" in goes_on[3]
    write_ranks(tmp_path / "ranks", BYTES)
    (again,) = run(tmp_path, f"{more} --ckpt-step 1")
    assert again[0] == 2 and "the training data is not the checkpoint's" in again[2] and "bin_sampled" in again[2]


def test_a_resume_whose_tokenizer_ends_documents_otherwise_is_refused(tmp_path):
    write_data(tmp_path / "x")  # as Megatron's, without a description of its tokenizer
    save = f"{' '.join(tokenizer_words(KINDS['huggingface-bos'](tmp_path)))} --save {tmp_path}/saved --save-interval 1"
    (begun,) = run(tmp_path, f"{save} --exit-interval 1")
    more = f"{save} --load {tmp_path}/saved"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 600}')  # beside the same tokenizer.json
    refused, goes_on = run(tmp_path, more, f"{more} --override-data")
    assert begun[0] == 0 and goes_on[0] == 0, (begun, goes_on)
    assert refused[:2] == (2, [])
    assert ": the end of a document is 0, here 600. Give that one, or --override-data\n" in refused[2]


def train_on_a_node_of_its_own(folder: str, port: int) -> tuple[int, str, str]:
    """Each rank finds its data in a folder of its own, as on nodes without a common file system."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    prefix = Path(folder) / f"node{dist.get_rank()}" / "x"
    return call_pretrain(flags(str(prefix), RUN, length="--train-iters 1"))[0]


@pytest.mark.parametrize("missing_documents", [pytest.param(0, marks=pytest.mark.long), 1])
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
