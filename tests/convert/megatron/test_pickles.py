"""Files that would run code, or are damaged, are refused in one line; nothing in them is called."""

import os
import pickle
import random
import shutil
import sys
import types
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.commands.convert import export_megatron, import_megatron
from megatron_zpp.convert.megatron.checkpoint import open_checkpoint
from megatron_zpp.convert.megatron.pickles import load_file, load_metadata
from tests.convert.megatron.layouts import CONFIGS, FORMATS, random_model, write_legacy
from tests.tools import call, call_well


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def exported(tmp_path) -> Path:
    """A checkpoint in the format torch_dist."""
    config = CONFIGS["llama"]
    write_legacy(tmp_path / "theirs", random_model(config), config)
    call_well(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    call_well(export_megatron, "--load", tmp_path / "ours", "--output", tmp_path / "exported")
    return tmp_path / "exported" / "iter_0000005"


def test_code_in_the_index_is_refused(exported, tmp_path):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (exported / ".metadata").write_bytes(pickle.dumps([1, Hostile(tmp_path / "mark")], protocol))
        with pytest.raises(CheckpointError, match=r"would call posix.mkdir, which Megatron and"):
            load_metadata(exported / ".metadata")
    (exported / ".metadata").write_bytes(b"cbuiltins\neval\n(S'1'\ntR.")
    with pytest.raises(CheckpointError, match=r"would call builtins.eval"):
        load_metadata(exported / ".metadata")
    assert not (tmp_path / "mark").exists()


def test_code_in_a_part_is_refused(exported, tmp_path):
    saved = open_checkpoint(exported)
    torch.save(Hostile(tmp_path / "mark"), tmp_path / "hostile.pt")
    content, file = (tmp_path / "hostile.pt").read_bytes(), exported / "__0_0.distcp"
    file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    for name in sorted(saved.names):
        with pytest.raises(CheckpointError):
            saved.read(name, "")
    assert not (tmp_path / "mark").exists()


def test_a_damaged_index_is_one_line(exported):
    """Any byte that is another one: the index is refused, or what it says is read."""
    draw, file = random.Random(0), exported / ".metadata"
    content = file.read_bytes()
    refused = 0
    for _ in range(60):
        place = draw.randrange(len(content))
        file.write_bytes(content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :])
        try:
            saved = open_checkpoint(exported)
            for name in saved.names:
                saved.read(name, "")
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("layout", FORMATS)
def test_hostile_and_damaged_files_of_every_layout_are_one_line(tmp_path, layout):
    """Each file in turn would run code, is cut short, or has another bit: refused, or imported; nothing is run."""
    draw, theirs = random.Random(layout), tmp_path / "theirs"
    FORMATS[layout](theirs, random_model(CONFIGS["gpt"]), CONFIGS["gpt"])
    torch.save(Hostile(tmp_path / "mark"), tmp_path / "hostile.pt")
    files = sorted(file for file in theirs.rglob("*") if file.is_file())
    refused = 0
    for file in draw.sample(files, min(len(files), 6)):
        content = file.read_bytes()
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        for damaged in (
            (tmp_path / "hostile.pt").read_bytes(),
            pickle.dumps(Hostile(tmp_path / "mark"), protocol=2),
            content[:place],
            content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :],
        ):
            file.write_bytes(damaged)
            code, _, err = call(import_megatron, "--input", theirs, "--save", tmp_path / "ours")
            assert code == 0 or (code, err.count("\n")) == (2, 1), err
            refused += code != 0
            shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        file.write_bytes(content)
    assert refused >= 4
    assert not (tmp_path / "mark").exists()


def test_files_that_are_missing_or_leave_the_checkpoint_are_named(exported, tmp_path):
    saved = open_checkpoint(exported)
    (exported / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"is not complete: __0_0\.distcp is missing"):
        saved.read("decoder.final_layernorm.weight", "")
    file = exported / ".metadata"
    (tmp_path / "xxxxxx").touch()
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../../xxxxxx"))
    with pytest.raises(CheckpointError, match="is not a file of the checkpoint"):
        open_checkpoint(exported)


class OfOldPython:
    """Is saved as Python before 3.11.4 saves a member of an enumeration; or as an attribute of something else."""

    def __init__(self, of: object, name: str) -> None:
        self.saved = getattr, (of, name)

    def __reduce__(self):
        return self.saved


def test_members_of_enumerations_as_older_pythons_save_them(tmp_path, monkeypatch):
    # Pickles of Megatron-DeepSpeed: torch.load may know the classes of an imported megatron-core.
    module = types.ModuleType("megatron.model.enums")
    module.PositionEmbeddingType = Enum("PositionEmbeddingType", "rotary absolute", module=module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save({"args": OfOldPython(module.PositionEmbeddingType, "rotary")}, tmp_path / "member.pt")
    assert load_file(tmp_path / "member.pt")["args"].args == ("rotary",)
    for of, name in ((torch.Size, "count"), ("text", "upper")):
        torch.save({"args": OfOldPython(of, name)}, tmp_path / "other.pt")
        with pytest.raises(CheckpointError):
            load_file(tmp_path / "other.pt")


def test_what_another_library_lets_torch_unpickle_is_not_unpickled_here(tmp_path):
    """megatron-core names NumPy's arrays; one of its files then held a real array in which ours put a stand-in."""
    torch.save({"state": np.arange(3)}, tmp_path / "file.pt")
    others = [np._core.multiarray._reconstruct, np.ndarray, np.dtype]
    with torch.serialization.safe_globals(others):
        assert not isinstance(load_file(tmp_path / "file.pt")["state"], np.ndarray)
        assert set(others) <= set(torch.serialization.get_safe_globals())
