"""A reader believes nothing in a folder that anybody may have changed, and neither hangs nor crashes over it."""

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.errors import describe_error
from megatron_zpp.publish import Publisher, PublishError, WeightReader
from megatron_zpp.publish.files import MOVES
from tests.publish.test_publish import digest
from tests.ranks import run_ranks
from tests.tools import cut, flip
from tests.zeropp.training_on_ranks import Net, shard

NASTY = [None, -1, 0, 3, 2**70, 1e308, True, "", "x", "../x", [], [-4], [0], {}, {"": {}}, [[]]]


def publish(folder: str) -> list[str]:
    """Publish three versions of a model that two ranks share; return the digest of each. For ``run_ranks``."""
    model, digests = Net(width=6, hidden=5, outputs=4, num_blocks=1), []
    model.register_buffer("counts", torch.arange(3))
    shard(model, None)
    publisher = Publisher(model, folder)
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01 + step)
        model.counts.add_(1)
        publisher.publish(step)
        reader = WeightReader(folder)
        reader.update()
        digests.append(digest(reader.tensors()))
        dist.barrier()
    return digests


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rewrite(path: Path, edit: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Change the header and the data of a file of shards, and let its manifest agree."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), bytearray(content[start:])
    edit(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    agree(path)


def agree(path: Path) -> None:
    """Let a manifest say what is in a file."""
    manifest, content = path.with_name(path.name[:9] + ".json"), path.read_bytes()
    described = json.loads(manifest.read_text())
    described["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(described))


def edit_manifest(folder: Path, draw: random.Random, edit: Callable[[dict[str, Any]], None]) -> None:
    path = draw.choice(sorted(folder.glob("*.json")))
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def change_bytes(folder: Path, draw: random.Random) -> None:
    path = draw.choice(shards_in(folder))
    content = path.read_bytes()
    begin = draw.choice([0, 8 + int.from_bytes(content[:8], "little")])  # the start of everything, or of the data
    flip(path, draw.randrange(begin, len(content)))


def change_version(folder: Path, draw: random.Random) -> None:
    """A rank's file of another version, which the manifest describes as it is."""
    other, path = draw.sample(sorted(folder.glob(draw.choice(["*.rank00000.*", "*.rank00001.*"]))), 2)
    shutil.copy(other, path)
    agree(path)


def change_size(folder: Path, draw: random.Random) -> None:
    path = draw.choice(shards_in(folder))
    if draw.random() < 0.5:
        cut(path, draw.randrange(path.stat().st_size))
    else:
        path.write_bytes(path.read_bytes() + bytes(draw.randrange(1, 99)))
    if draw.random() < 0.5:
        agree(path)


def change_kind(folder: Path, draw: random.Random) -> None:
    """A pipe, a device, a folder, a link to the same content, to nothing; or no file at all."""
    path = draw.choice(sorted(folder.iterdir()))
    away = path.rename(folder.parent / "elsewhere")
    target = draw.choice(["/dev/zero", str(away), "nowhere", "pipe", "folder", ""])
    if target == "pipe":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    elif target:
        path.symlink_to(target)


def change_manifest(folder: Path, draw: random.Random) -> None:
    """A value of another type, or none at all; nothing tells a wrong step from a right one."""

    def edit(manifest: dict[str, Any]) -> None:
        key = draw.choice(["format", "run", "version", "base", "files"])
        manifest[key] = draw.choice(NASTY)
        if draw.random() < 0.3:
            del manifest[key]

    edit_manifest(folder, draw, edit)


def change_entry(folder: Path, draw: random.Random) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        name = draw.choice(sorted(manifest["files"]))
        entry = manifest["files"][name]
        if draw.random() < 0.4:
            manifest["files"].pop(name)
        elif draw.random() < 0.5:
            manifest["files"][name] = draw.choice(NASTY)
        else:
            entry[draw.choice(["bytes", "sha256"])] = draw.choice(NASTY)

    edit_manifest(folder, draw, edit)


def change_name(folder: Path, draw: random.Random) -> None:
    """The right content at another place, where a link or another user's file may be."""

    def edit(manifest: dict[str, Any]) -> None:
        name = draw.choice(sorted(manifest["files"]))
        other = draw.choice([f"{folder.parent}/{name}", f"../{name}", f"./{name}", f"v1.{name[10:]}", f"{name} "])
        manifest["files"][other] = manifest["files"].pop(name)
        shutil.move(folder / name, folder / other)

    edit_manifest(folder, draw, edit)


def change_text(folder: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.glob("*.json")))
    text = path.read_text()
    twice = text[:-1] + ', "files": {}}'
    path.write_text(draw.choice(["", "[" * 100_000, twice, text[: len(text) // 2], "null", "[]", "9" * 5000, "\0\xff"]))


def change_header(folder: Path, draw: random.Random) -> None:
    """Types, shapes, offsets in the file, and places in the whole tensor."""

    def edit(header: dict[str, Any], data: bytearray) -> None:
        metadata = header["__metadata__"]
        places = json.loads(metadata.get("places", "{}"))
        name = draw.choice(sorted(header.keys() - {"__metadata__"}))
        values = [(header, name), (header[name], draw.choice(["dtype", "shape", "data_offsets"]))]
        values += [(header[name]["data_offsets"], draw.randrange(2)), (metadata, draw.choice(sorted(metadata)))]
        values += [(header, "__metadata__"), (header[name]["shape"], 0)]
        if places:
            place = places[draw.choice(sorted(places))]
            values = values[draw.randrange(6) :] + 4 * [(place, draw.randrange(2)), (place[draw.randrange(2)], 0)]
        where, key = draw.choice(values)
        where[key] = draw.choice(NASTY)
        if places and "places" in metadata and where is not metadata:
            metadata["places"] = json.dumps(places)

    rewrite(draw.choice(shards_in(folder)), edit)


def change_length_of_header(folder: Path, draw: random.Random) -> None:
    path = draw.choice(shards_in(folder))
    length = draw.choice([0, 1, 7, 2**20, 2**40, 2**64 - 1])
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    agree(path)


def change_moves(folder: Path, draw: random.Random) -> None:
    """Moves are numbers: any may be right. But none may write outside of the weights."""

    def edit(header: dict[str, Any], data: bytearray) -> None:
        begin, end = header[MOVES]["data_offsets"]
        body = bytes(draw.randrange(9000)) + draw.randbytes(draw.randrange(1, 99))
        counts, parameters = draw.choice([(1, 0), (9, 9), (65535, 65535)]), [draw.randrange(256) for _ in range(3)]
        data[begin:end] = moves = struct.pack("<HHBBBBI", *counts, *parameters, 0, len(body)) + body
        header[MOVES]["shape"] = [len(moves)]
        for entry in [value for key, value in header.items() if key != "__metadata__"]:
            entry["data_offsets"] = [at + (begin + len(moves) - end) * (at >= end) for at in entry["data_offsets"]]

    rewrite(draw.choice([path for path in shards_in(folder) if not path.name.startswith("v00000001")]), edit)


CHANGES = [
    *(change_bytes, change_version, change_size, change_kind, change_manifest, change_entry, change_name, change_text),
    *(change_header, change_header, change_header, change_length_of_header, change_moves),
]


def read_each(published: str, digests: list[str], number: int) -> list[tuple[str, str]]:
    """Read folders that were changed, each by its seed; return what was changed and how it ended. For ``run_ranks``."""
    outcomes = []
    for seed in range(number):
        draw, change = random.Random(seed), CHANGES[seed % len(CHANGES)]
        folder = Path(published).with_name(f"copy{seed}") / "weights"
        folder.mkdir(parents=True)
        for path in Path(published).glob("v00000001.*"):
            shutil.copy(path, folder)
        reader = WeightReader(folder)
        if draw.random() < 0.5:
            reader.update()
        shutil.copytree(published, folder, dirs_exist_ok=True)
        change(folder, draw)
        try:
            outcome = "new" if reader.update() else "old"
        except PublishError as error:
            outcome = f"refused: {error}"
        try:
            seen = digest(reader.tensors())
        except PublishError:
            seen = ""
        if change is not change_moves and seen not in ("", digests[(reader.version or 0) - 1]):
            outcome = f"BELIEVED with seed {seed}"
        outcomes.append((change.__name__, outcome))
    return outcomes


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder, and the digest of the weights of each of its three versions."""
    folder = tmp_path_factory.mktemp("published")
    return folder, run_ranks(2, publish, str(folder))[0]


def test_of_200_changed_folders_none_is_believed_and_none_hangs_or_crashes(published, tmp_path):
    folder = shutil.copytree(published[0], tmp_path / "published")
    (outcomes,) = run_ranks(1, read_each, str(folder), published[1], 200, timeout=60)
    assert not [outcome for outcome in outcomes if outcome[1].startswith("BELIEVED")]
    refused = [text for _, text in outcomes if text.startswith("refused")]
    assert len(refused) > 150 and not any("\n" in text for text in refused)
    noticed = {name for name, text in outcomes if text.startswith("refused")}
    assert noticed | {"change_moves"} == {change.__name__ for change in CHANGES}


def test_a_run_that_publishes_faster_than_it_can_be_read_is_an_error(published, tmp_path, monkeypatch):
    """Each time that the reader looks, there is a newer version, whose file is deleted already."""
    weights, listing = shutil.copytree(published[0], tmp_path / "weights"), os.listdir

    def publish_another(folder: Path) -> list[str]:
        newest = max(path for path in Path(folder).glob("v*.json"))
        version = int(newest.stem[1:]) + 1
        manifest = json.loads(newest.read_text()) | {"version": version, "base": None}
        manifest["files"] = {f"v{version:08d}.rank00000.safetensors": {"bytes": 1, "sha256": ""}}
        newest.with_name(f"v{version:08d}.json").write_text(json.dumps(manifest))
        return listing(folder)

    monkeypatch.setattr(os, "listdir", publish_another)
    with pytest.raises(PublishError, match=rf"deleted versions in {weights} before they were read, for 0\.5 s: let it"):
        WeightReader(weights).update(timeout_seconds=0.5)


def test_a_folder_that_is_a_file_is_told_with_its_remedy_once(tmp_path):
    """What ``generate-text --follow`` prints of it."""
    (tmp_path / "file").touch()
    with pytest.raises(PublishError) as refused:
        WeightReader(tmp_path / "file").update()
    assert describe_error(refused.value).count("(a part of the path is a file: give another path)") == 1
