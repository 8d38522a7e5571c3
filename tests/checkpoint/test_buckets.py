"""Checkpoints under a URL, in fsspec's store of this process. tests/checkpoint/test_s3.py has a server."""

import json
import pickle
from unittest import mock

import fsspec
import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint import (
    CheckpointError,
    FolderLock,
    candidates,
    find_checkpoint,
    iterate_parameters,
    problems,
    read_meta,
)
from megatron_zpp.checkpoint.folder import describe_empty, retain
from megatron_zpp.checkpoint.index import read_index
from megatron_zpp.checkpoint.resume import check_not_overwritten, checkpoint_to_load
from megatron_zpp.checkpoint.saver import CheckpointSaver
from megatron_zpp.checkpoint.tokenizer import settings_with_tokenizer
from megatron_zpp.commands import inspect_checkpoint
from megatron_zpp.errors import describe_error
from megatron_zpp.files import as_path
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.settings.groups import CheckpointSettings
from tests.arguments.parsing import mistakes
from tests.checkpoint.saved import FLAGS_OF_RUN, save
from tests.ranks import run_ranks
from tests.tools import call_well, refuse

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store():
    store = fsspec.filesystem("memory").store
    store.clear()
    return store


def value(checkpoint):
    assert problems(checkpoint) == []
    return {tensor.unique().item() for _, tensor in iterate_parameters(checkpoint, read_meta(checkpoint))}


def test_a_checkpoint_is_found_again_whole(store, capsys):
    FolderLock(RUN).release()
    assert find_checkpoint(RUN) is None and "no checkpoint in memory://bucket/run yet" in describe_empty(RUN)
    for iteration in (1, 2):
        save(as_path(RUN), iteration, value=iteration)
    found = find_checkpoint(RUN)
    assert str(found) == f"{RUN}/iter_0000002" and value(found) == {2.0}
    assert pickle.loads(pickle.dumps(found)) == found  # ranks send it to each other
    assert [path.name for path in candidates(RUN)] == ["iter_0000002", "iter_0000001"]
    assert value(find_checkpoint(RUN, 1)) == {1.0}
    assert "iter_0000002 (latest): gpt" in call_well(inspect_checkpoint, "list", RUN)
    assert "note: memory://bucket/run knows no locks: let no other job save there" in capsys.readouterr().out
    retain(RUN, 1, None)
    assert {name.split("/")[3] for name in store} == {"lock", "latest_checkpointed_iteration.txt", "iter_0000002"}


@pytest.mark.parametrize("lost", [["complete"], ["complete", "meta.json"], ["complete", "meta.json", "index.json"]])
def test_an_upload_that_was_cut_short_is_named_and_the_one_before_it_loads(store, capsys, lost):
    for iteration in (1, 2):
        save(as_path(RUN), iteration, value=iteration)
    for name in lost:
        del store[f"/bucket/run/iter_0000002/{name}"]
    for latest in (b"1\n", b"2\n"):  # 2: it was saved a second time
        store["/bucket/run/latest_checkpointed_iteration.txt"].seek(0)
        store["/bucket/run/latest_checkpointed_iteration.txt"].write(latest)
        assert value(find_checkpoint(RUN)) == {1.0}
        note = "note: passed over memory://bucket/run/iter_0000002: its upload was cut short, or still goes on\n"
        assert capsys.readouterr().out == note
    with pytest.raises(CheckpointError, match="iter_0000002 is not a complete checkpoint; complete ones: iter_0000001"):
        find_checkpoint(RUN, 2)
    save(as_path(RUN), 2, value=3)
    assert value(find_checkpoint(RUN)) == {3.0} and capsys.readouterr().out == ""


def test_a_save_of_the_same_iteration_never_leaves_the_old_marker_over_new_shards(store, monkeypatch):
    save(as_path(RUN), 1, value=1)
    save(as_path(RUN), 2, value=2)
    written, has_marker = [], []

    class Store(type(fsspec.filesystem("memory"))):
        def open(self, path, mode="rb", **more):
            if mode == "wb":
                written.append(path)
                has_marker.append(self.isfile("/bucket/run/iter_0000002/complete"))
            return super().open(path, mode, **more)

    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **more: (Store(), Store._strip_protocol(url)))
    save(as_path(RUN), 2, value=3)
    assert [path.rpartition("/")[2] for path in written][-2:] == ["complete", "latest_checkpointed_iteration.txt"]
    assert has_marker == [False] * (len(written) - 1) + [True]


def test_damage_is_found(store):
    checkpoint = save(as_path(RUN), 1)
    content = store["/bucket/run/iter_0000001/rank_00000.safetensors"]
    content.seek(-1, 2)
    content.write(b"\x01")
    assert problems(checkpoint) == [f"{checkpoint}/rank_00000.safetensors is not what was written: its SHA-256 differs"]


def test_a_request_that_fails_is_no_empty_folder(monkeypatch):
    """A run must not start from scratch because a bucket did not answer."""
    save(as_path(RUN), 1)

    def fail(*arguments, **more):
        raise RuntimeError("the token\nhas expired")

    for name in ("ls", "info", "_open"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, fail)
    for call_it in (find_checkpoint, candidates, describe_empty, FolderLock):
        with pytest.raises(OSError) as error:
            call_it(RUN)
        line = describe_error(error.value)
        assert RUN in line and "the token has expired (check its name, the network and your credentials" in line


def test_retention_deletes_what_was_cut_short_below_the_latest_and_nothing_of_others(store):
    save(as_path(RUN), 3)
    for name in ("1/common.pt", "2/rank_00001.safetensors", "4/rank_00001.safetensors"):
        with as_path(f"{RUN}/iter_000000{name}").open("wb") as file:
            file.write(b"a part")
    retain(RUN, 1, None)
    assert [path.name[-1] for path in as_path(RUN).glob("iter_*")] == ["1", "3", "4"]


def load_where_a_rank_is_refused(lost, rank):
    save(as_path(RUN), 1)
    save(as_path(RUN), 2)
    if dist.get_rank() == rank:
        refuse(pytest.MonkeyPatch(), f"iter_0000002/{lost}", "rb")
    with pytest.raises(FailedTogether) as failed:
        checkpoint_to_load(CheckpointSettings(load=RUN, load_latest_good=True))
    return str(failed.value)


@pytest.mark.parametrize("lost, rank", [("meta.json", 1), ("index.json", 0), ("rank_00000.safetensors", 1)])
def test_a_rank_whose_requests_fail_does_not_send_the_run_back_to_an_older_checkpoint(lost, rank):
    want = f"cannot read {RUN}/iter_0000002/{lost}: the token has expired (check its name, the network and your cred"
    for line in run_ranks(2, load_where_a_rank_is_refused, lost, rank):
        assert line.startswith(want)


def test_where_the_shards_are_is_read_once_for_all_tensors(monkeypatch):
    checkpoint = save(as_path(RUN), 1)
    index = read_index(checkpoint, read_meta(checkpoint), ranks=["0"])
    refuse(monkeypatch, "shards.bin", "rb")
    assert [index.rows(name)[:, -1].tolist() for name in index.tensors]
    memory = fsspec.filesystem("memory")
    with mock.patch.object(type(memory), "info", wraps=memory.info) as info:
        assert (checkpoint / "shards.bin").stat().st_size > 0 and info.call_count == 1


def test_a_slow_upload_ends_no_run(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: timeout.total_seconds() / 60)
    groups = [CheckpointSaver(CheckpointSettings(save=folder), 10, None)._group for folder in (RUN, "folder")]
    assert groups == [24 * 60, 10]


def test_tokenizers_read_local_copies_of_a_checkpoints_files(store):
    checkpoint = save(as_path(RUN), 1)
    meta = read_meta(checkpoint)
    with (checkpoint / "vocab.json").open("wb") as file:
        file.write(b"{}")
    meta["files"]["vocab.json"] = {}
    with open(settings_with_tokenizer(checkpoint, meta)["vocab_file"]) as file:
        assert json.load(file) == {}


def test_flags_name_what_a_bucket_needs():
    (line,) = mistakes(f"{FLAGS_OF_RUN} --save {RUN} --save-interval 5")
    assert line == "--save in a bucket needs --metrics-dir DIR, a folder here for metrics.jsonl"
    (line,) = mistakes(f"{FLAGS_OF_RUN} --save gs://bucket/run --save-interval 5 --metrics-dir here")
    want = "--save must be a URL that fsspec can open (Please install gcsfs to access Google Storage; pip install "
    assert line.startswith(f"{want}s3fs for s3://, gcsfs for gs://, huggingface_hub for hf://)")
    with pytest.raises(ValueError, match="Protocol not known: s4"):
        as_path("s4://bucket/run")
    with pytest.raises(CheckpointError, match="which deleting takes for a pattern"):
        check_not_overwritten(CheckpointSettings(save="memory://bucket/ru?"))


def test_what_another_rank_wrote_to_the_hub_is_seen():
    """Its file system lists a folder once, and would answer from that."""
    with as_path("hf://buckets/name/run")._requests("list") as (first, _):
        first.dircache["buckets/name"] = []
    with as_path("hf://buckets/name/run")._requests("list") as (second, _):
        assert second.dircache == {}
