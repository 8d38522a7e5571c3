"""--hf-dataset: Parquet files of this project's pages, streamed through the package datasets."""

import itertools
import json
import os
import re
import signal
from itertools import islice
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.index_cache import no_progress
from megatron_zpp.data.loader import build_loader
from megatron_zpp.data.source import DataRequest, Datasets
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from megatron_zpp.data.text_stream import STREAM
from megatron_zpp.training.data import resume_streams
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, torchrun, wait_for_iteration

pytestmark = pytest.mark.integrations
TEXTS = {part: None for page in sorted(ROOT.glob("docs/*/*.md")) for part in page.read_text().split("\n\n") if part}
TEXTS = [*TEXTS][:1200]  # each once
RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 60 --eval-interval 20 --eval-iters 3 --log-interval 1 --tokenizer-type ByteTokenizer"
)


def write(folder, texts, column="text", files=3):
    folder.mkdir(exist_ok=True)
    for i in range(files):
        table = pyarrow.table({"n": range(len(texts[i::files])), column: pyarrow.array(texts[i::files], "string")})
        pyarrow.parquet.write_table(table, folder / f"{i}.parquet", row_group_size=100)
    return str(folder)


def open_stream(*words, notes=None, split=None, length=128):
    options = SampleOptions(seq_length=length, seed=1, eod=256)
    flags = SimpleNamespace(hf_dataset=words, split=split)
    note = [].append if notes is None else notes.append
    return STREAM.open(DataRequest(flags, options, (9, 9, 0), ByteTokenizer(), {}, no_progress, note))


def read(stream, rank=0, ranks=1, workers=0, consumed=0):
    sizes = dict(consumed_samples=consumed, micro_batch_size=2, dp_rank=rank, dp_size=ranks, num_workers=workers)
    return (batch["tokens"].tolist() for batch in build_loader(stream, **sizes, device="cpu"))


def test_any_number_of_workers_reads_the_same_and_goes_on_from_any_sample(tmp_path):
    folder = write(tmp_path / "texts", TEXTS)
    read_by = [[*islice(read(open_stream(folder).train, workers=workers), 200)] for workers in (0, 1, 2, 4)]
    assert read_by[0] == read_by[1] == read_by[2] == read_by[3]
    # Files are divided among 3 ranks, documents among 2. The longer samples take more than one call of a worker.
    for split, ranks, length in (("train", 2, 20_000), ("valid", 3, 128)):
        notes: list[str] = []
        stream = getattr(open_stream(folder, notes=notes, length=length), split)
        batches, seen = [], []
        for batch in islice(read(stream, 1, ranks), 150):
            batches.append(batch)
            seen.append(json.loads(json.dumps(stream.position)))
        assert split == "train" or "rank 1 begins epoch 2 of the valid documents" in notes[0]
        for at in range(0, 140, 23):
            for skipped in (0, 2):  # by an evaluation that was cut short
                again = getattr(open_stream(folder, length=length), split)
                again.begin_at(seen[at])
                first = at + 1 + skipped
                assert [*islice(read(again, 1, ranks, 1, first * 2 * ranks), 5)] == batches[first : first + 5]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_and_splits_share_no_document_and_lose_none(tmp_path, ranks):
    found, notes = [], []
    streams = open_stream(write(tmp_path / "texts", TEXTS), notes=notes)
    for stream, rank in itertools.product(streams[:2], range(ranks)):
        notes.clear()
        for _, documents in stream._blocks(rank, ranks):
            if notes:  # the next epoch
                break
            found += documents
    assert sorted(found) == sorted(TEXTS)


def test_a_killed_run_goes_on_to_the_bit_and_refuses_other_text(tmp_path):
    folder = write(tmp_path / "texts", TEXTS)
    argv = [*RUN.split(), "--num-workers", "0", "--hf-dataset", folder]
    saved = [*argv, "--save", str(tmp_path / "saved"), "--save-interval", "4"]
    killed = torchrun(0, ["2" if word == "0" else word for word in saved])  # --num-workers
    wait_for_iteration(killed, 21)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    again = [*saved, "--load", str(tmp_path / "saved")]
    (whole, resumed) = run_ranks(1, call_pretrain, argv, again)[0]
    losses = [re.findall(r"lm loss(?: value)?: (\S+)", out) for _, out, _ in (whole, resumed)]
    assert (whole[0], resumed[0]) == (0, 0), resumed[2]
    assert 4 <= len(losses[1]) < len(losses[0]) == 63 and losses[0][-len(losses[1]) :] == losses[1]
    write(tmp_path / "texts", TEXTS[5:])
    (refused, overridden) = run_ranks(1, call_pretrain, again, [*again, "--override-data", "--ckpt-step", "4"])[0]
    assert refused[0] == 2 and re.search(r"training data is not the checkpoint's: its files, .* differ", refused[2])
    assert overridden[0] == 0, overridden[2]
    assert "note: --override-data: the text is read from its start" in overridden[1]
    datasets = Datasets(open_stream(folder).train, None, None)
    with pytest.raises(ValueError, match="divided among 1 data-parallel ranks, and is now among 2: give the same"):
        resume_streams(datasets, {"streams": [[0, {}]]}, Counters(), SimpleNamespace(dp_size=2, dp_rank=0))


def test_text_that_cannot_be_read_is_one_line_that_says_what_to_do(tmp_path):
    folder, other = write(tmp_path / "texts", TEXTS[:9]), write(tmp_path / "other", ["a"] * 9, "body")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.parquet").write_bytes(b"no Parquet")
    for words, message in (
        ((other,), r"has no text in a column text: give column=NAME with one of n, body$"),
        ((folder, "column=n"), "has no text in a column n: give column=NAME with one of n, text"),
        ((folder, "split=test"), "has no split test: give split=NAME with one of train"),
        ((folder, "col=n"), "col=n: give a name, and KEY=VALUE of name, data_dir, data_files, revision, split, column"),
        ((write(tmp_path / "empty", [None, ""] * 9),), "no document of .* is in the train split: give it a larger"),
        ((str(tmp_path / "bad"),), "bad cannot be opened: .*Parquet"),
        ((str(tmp_path / "none"),), "none cannot be opened: "),
    ):
        with pytest.raises(ValueError, match=message) as error:
            open_stream(*words)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="has no document for rank 8 of 9: give more text"):
        next(read(open_stream(write(tmp_path / "few", TEXTS[:4])).train, 8, 9))
    assert len(next(read(open_stream(other, "column=body").train))) == 2
