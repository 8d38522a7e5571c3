"""Checkpoints that somebody changed, with digests that are right: they load, or one line says what is wrong."""

import contextlib
import copy
import functools
import io
import json
import operator
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import (
    CheckpointError,
    FolderLock,
    candidates,
    find_checkpoint,
    iterate_tensors,
    problems,
    read_meta,
)
from megatron_zpp.checkpoint.files import open_regular, write_durably
from megatron_zpp.checkpoint.folder import _wait_for_files, retain
from megatron_zpp.checkpoint.index import read_index
from megatron_zpp.checkpoint.meta import Counters, saved_model
from megatron_zpp.checkpoint.resume import check_settings
from megatron_zpp.checkpoint.state import _check_shapes
from megatron_zpp.commands.inspect_checkpoint import list_checkpoints
from megatron_zpp.data.order import check_order
from megatron_zpp.families import GPT
from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.optim.schedule import Schedule, resume_schedule
from megatron_zpp.settings.groups import PrecisionSettings, Settings
from tests.checkpoint.saved import replace, rewrite, save
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each


@pytest.fixture(scope="module")
def argv(data) -> list[str]:
    return flags(data, "--num-layers 1 --zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1 --fp16")


@pytest.fixture(scope="module")
def real(argv, tmp_path_factory) -> Path:
    """A checkpoint of a run on 2 ranks."""
    folder = tmp_path_factory.mktemp("real")
    run_ranks(2, train_each, {"": [*argv, *f"--save {folder} --save-interval 1 --exit-interval 1".split()]})
    return folder / "iter_0000001"


# Values that are something else than what was saved

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
VALUES = (None, True, -1, 0, 1.5, float("nan"), float("inf"), 2**63, 10**300, "", "../x", [], {}, [1, "x"], DEEP)
DELETED, COPIED = object(), object()


def places_in(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every value in a JSON object."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from places_in(child, (*at, key))


def mutated(value: Any, at: tuple) -> Iterator[Any]:
    """Yield the object with one value replaced, left out, or given a companion."""
    for other in (*VALUES, DELETED, COPIED):
        whole = copy.deepcopy(value)
        *path, key = at
        parent = functools.reduce(operator.getitem, path, whole)
        if other is DELETED:
            del parent[key]
        elif other is COPIED and isinstance(parent, list):
            parent.append(0)
        else:
            parent["more" if other is COPIED else key] = parent[key] if other is COPIED else other
        yield whole


def use(checkpoint: Path, settings: Settings, saved: dict[str, Any]) -> None:
    """Do what a run and the tools do with meta.json. saved: as the run wrote it."""
    with contextlib.redirect_stdout(io.StringIO()):
        list_checkpoints(str(checkpoint.parent))
    meta = read_meta(checkpoint)
    Counters.from_meta(meta)
    check_settings(settings, meta)
    if meta.get("data_order") is not None:
        check_order(meta["data_order"], saved["data_order"])
    if meta["schedule"] is not None:
        schedule = resume_schedule(Schedule(**saved["schedule"]), meta["schedule"], use_checkpoint=True)
        assert 0 <= schedule.lr(5) < 1e300 and 0 <= schedule.weight_decay < 1e300
    LossScaler(PrecisionSettings(fp16=True)).load_state_dict(meta["loss_scaler"])
    saved_model(meta)
    problems(checkpoint)  # reads index.json as well


def load(checkpoint: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check that the tensors that index.json locates are those that were saved."""
    meta = read_meta(checkpoint)
    _check_shapes(checkpoint, expected, read_index(checkpoint, meta).tensors)
    for name, tensor in iterate_tensors(checkpoint, meta):
        assert name not in expected or torch.equal(tensor, expected[name]), name


def is_refused(step: Callable[[], None]) -> bool:
    try:
        step()
    except ValueError as error:
        assert type(error) in (ValueError, CheckpointError), repr(error)
        assert len(str(error)) < 1500
        return True
    return False


@pytest.mark.parametrize("name", ["meta.json", "index.json"])
def test_every_value_that_is_another_is_refused_or_does_no_harm(real, argv, tmp_path, name):
    checkpoint = shutil.copytree(real.parent, tmp_path / "copy") / real.name
    content, meta = json.loads((real / name).read_text()), read_meta(real)
    draw = random.Random(0)
    if name == "index.json":
        expected = dict(iterate_tensors(real, meta))
        kept = [draw.choice([key for key in expected if key.startswith(kind)]) for kind in ("model.", "zeropp.")]
        places = [at for at in places_in(content) if len(at) < 2 or at[1] in kept]
        step = functools.partial(load, checkpoint, expected)
    else:
        kept = {*draw.sample(sorted(content["settings"]), 5), "architecture", "seq_length", "data_path"}
        places = [at for at in places_in(content) if at[0] != "settings" or len(at) < 2 or at[1] in kept]
        groups = [at for at in places if len(at) == 1]
        places = groups + draw.sample([at for at in places if len(at) > 1], 50)  # another 50 with another seed
        step = functools.partial(use, checkpoint, parse_settings(GPT, argv, 2, note=lambda text: None), meta)
    assert not is_refused(step)
    refused = []
    for changed in (changed for at in places for changed in mutated(content, at)):
        rewrite(checkpoint, name, lambda _, changed=changed: changed)
        refused.append(is_refused(step))
    assert sum(refused) > len(refused) // 2


NO_METADATA = (b"", b"null", b"[]", b"3", b"{", b"\xff", b'{"tensors": []}', b"1" * 9999)
NO_METADATA += (b"[" * 200_000, b'{"tensors":' * 50_000)


@pytest.mark.parametrize("name", ["meta.json", "index.json"])
def test_text_that_is_no_metadata(tmp_path, name):
    checkpoint = save(tmp_path, 1)
    for text in NO_METADATA:
        replace(checkpoint, name, text)
        (problem,) = problems(checkpoint)
        assert f"{name} is damaged" in problem or f"{name} has the format None" in problem
        assert len(problem) < 600


# Shards of tensors


def _divide(checkpoint: Path, change: Callable[[Any, Any, Any], Any]) -> None:
    """Divide a [4, 3] tensor into shards [0, 2) and [2, 4), at bytes [begin, begin + 24) and what follows."""
    *_, begin, _, _, _, of_second = np.fromfile(checkpoint / "shards.bin", dtype="<i8").tolist()
    shards = [[0, 0, 2, 3, 0, begin], [2, 0, 2, 3, 0, begin + 24], [0, 5, 0, of_second]]
    change(*shards)
    replace(checkpoint, "shards.bin", b"".join(np.array(shard, dtype="<i8").tobytes() for shard in shards))

    def locate(index: dict[str, Any]) -> None:
        index["tensors"]["model.first"]["rows"] = [0, 2]
        index["tensors"]["model.second"]["rows"] = [12, 1]

    rewrite(checkpoint, "index.json", locate)


def test_a_tensor_in_shards_loads(tmp_path):
    checkpoint = save(tmp_path, 1)
    _divide(checkpoint, lambda *shards: None)
    assert problems(checkpoint) == []
    assert dict(iterate_tensors(checkpoint, read_meta(checkpoint)))["model.first"].eq(1).all()


def test_shards_beyond_the_first_gigabyte_of_a_file_load(tmp_path):
    """Each rank's file of a large model is one; the file here is sparse."""
    checkpoint = save(tmp_path, 1)
    begin, name = 3 * 2**30, "rank_00000.safetensors"
    _divide(checkpoint, lambda a, b, other: other.__setitem__(-1, begin))
    rewrite(checkpoint, "meta.json", lambda meta: meta["files"][name].update(bytes=begin + 20))
    with open(checkpoint / name, "r+b") as file:
        file.seek(begin)
        file.write(b"\0" * 20)
    assert dict(iterate_tensors(checkpoint, read_meta(checkpoint)))["model.second"].eq(0).all()


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda a, b, _: b.__setitem__(0, 0), "the shards of model.first do not cover it exactly"),
        (lambda a, b, _: b.__setitem__(0, 1), "the shards of model.first do not cover it exactly"),
        (lambda a, b, _: b.__setitem__(2, 1), "the shards of model.first do not cover it exactly"),
        (lambda a, b, _: b.__setitem__(0, 3), "a shard of model.first is not of its size"),
        (lambda a, b, _: b.__setitem__(0, -1), "a shard of model.first is not of its size"),
        (lambda a, b, _: b.__setitem__(2, 0), "a shard of model.first is not of its size"),
        (lambda a, b, _: b.__setitem__(5, a[5]), "model.first and model.first share bytes"),
        (
            lambda a, b, other: other.__setitem__(3, a[5] + 4),
            "model.first and model.second share bytes of rank_00000.safetensors",
        ),
    ],
)
def test_shards_that_do_not_make_up_a_tensor_are_refused(tmp_path, change, expected):
    checkpoint = save(tmp_path, 1)
    _divide(checkpoint, change)
    (problem,) = problems(checkpoint)
    assert "index.json is damaged" in problem and expected in problem


# Not a regular file

SPECIAL = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "a folder": os.mkdir,
    "a device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),  # /dev/zero, which has no end
    "a symbolic link": lambda path: path.symlink_to(path.with_name(path.name + ".there").resolve()),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_files_that_are_not_regular_ones_are_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    for number, name in enumerate(("meta.json", "index.json", "complete", "rank_00000.safetensors", "latest")):
        folder = Path(str(number))
        checkpoint = save(folder, 1)
        path = checkpoint / name if name != "latest" else folder / "latest_checkpointed_iteration.txt"
        path.rename(path.with_name(path.name + ".there"))
        try:
            SPECIAL[kind](path)
        except PermissionError:
            pytest.skip("only root makes devices")
        said = problems(checkpoint)
        if name == "latest":
            with pytest.raises(CheckpointError) as error:
                find_checkpoint(str(folder))
            said = [str(error.value)]
            assert candidates(str(folder)) == [checkpoint]
        assert len(said) == 1 and f"{path} is {kind}, not a regular file" in said[0]


def test_what_is_written_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    links = {"symbolic": os.symlink, "hard": os.link}
    for kind, link in links.items():
        (tmp_path / kind).mkdir()
        link(victim, tmp_path / kind / "lock")
        link(victim, tmp_path / kind / "name")
        with pytest.raises(CheckpointError, match=r"lock is (a symbolic link|a file that has another name)"):
            FolderLock(str(tmp_path / kind))
        with pytest.raises(CheckpointError, match=r"name is (a symbolic link|a file that has another name)"):
            write_durably(tmp_path / kind / "name", b"1")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a pipe"):
        open_regular(tmp_path / "pipe", "wb")
    assert victim.read_text() == "precious"


def test_folders_may_be_links_and_what_they_point_at_is_never_deleted(tmp_path):
    for iteration in (1, 2):
        save(tmp_path / "real", iteration)
    archived = shutil.move(tmp_path / "real" / "iter_0000001", tmp_path / "archived")
    (tmp_path / "real" / "iter_0000001").symlink_to(archived)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / "real" / "iter_0000003.incomplete").symlink_to(elsewhere)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = find_checkpoint(str(tmp_path / "link"), 1)
    assert found is not None and problems(found) == []
    save(tmp_path / "link", 3)
    retain(tmp_path / "link", 1, None)
    assert {path.name for path in (tmp_path / "real").glob("iter_*")} == {"iter_0000003"}
    assert (elsewhere / "precious").exists() and problems(archived) == []


# Folders of others

FOREIGN = {
    "Megatron-LM (--ckpt-format torch)": "latest_checkpointed_iteration.txt iter_0000005/mp_rank_00/model_optim_rng.pt",
    "Megatron-LM (--ckpt-format torch_dist)": "latest_checkpointed_iteration.txt iter_0000005/common.pt "
    "iter_0000005/.metadata iter_0000005/__0_0.distcp",
    "DeepSpeed": "latest global_step5/mp_rank_00_model_states.pt global_step5/zero_pp_rank_0_optim_states.pt",
    "DeepSpeed, a universal one": "latest_universal global_step5_universal/mp_rank_00_model_states.pt "
    "global_step5_universal/zero/embedding.word_embeddings.weight/fp32.pt",
    "Megatron-LM": "mp_rank_00/model_optim_rng.pt",  # not a fresh folder, though there is no file in it
    "torch.distributed.checkpoint": ".metadata __0_0.distcp",
    "a Hugging Face model": "config.json model.safetensors",
}
ELSEWHERE = ("torch.distributed.checkpoint", "a Hugging Face model")  # these are not imported as Megatron's


@pytest.mark.parametrize("whose", FOREIGN)
@pytest.mark.parametrize("tracked", ["5", "release"])
def test_folders_of_other_programs_are_named(tmp_path, whose, tracked):
    for name in FOREIGN[whose].split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(tracked)
    for iteration in (None, 5):
        with pytest.raises(CheckpointError) as error:
            find_checkpoint(str(tmp_path), iteration)
        tool = "tools/import_hf.py" if whose in ELSEWHERE else f"tools/import_megatron.py --input {tmp_path}"
        assert whose in str(error.value) and tool in str(error.value)


def test_one_checkpoint_in_place_of_its_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is one checkpoint: give --load the folder"):
        find_checkpoint(str(save(tmp_path, 1)))


@pytest.mark.parametrize(
    "tampered",
    [{"optimizers_have_stepped": []}, {"optimizers_have_stepped": ["x"]}, {"consumed_train_samples": 10**15}],
)
def test_values_that_no_run_can_have_are_named(tmp_path, tampered):
    checkpoint = save(tmp_path, 1)
    name = next(iter(tampered))
    rewrite(checkpoint, "meta.json", lambda meta: (meta["counters"] if "samples" in name else meta).update(tampered))
    with pytest.raises(CheckpointError, match=f"{name} is .*load another checkpoint"):
        read_meta(checkpoint)


def test_a_folder_that_is_removed_during_a_save_is_named(tmp_path):
    with pytest.raises(OSError, match="gone was removed while the checkpoint was written there"):
        _wait_for_files(tmp_path / "gone", {"rank_00000.safetensors": {"bytes": 1}})
