"""On a full disk a program ends in one line that names the file and what was done, and leaves no half of it."""

import dataclasses
import os

import pytest

from megatron_zpp.commands.convert import export_hf, export_megatron, import_hf
from megatron_zpp.commands.data import merge_datasets, preprocess_data, train_tokenizer
from megatron_zpp.planning.cluster import read_cluster, write_cluster
from tests.commands.test_export_hf import save_untrained
from tests.conftest import ROOT, fill
from tests.convert.hf.small_models import CONFIGS
from tests.tools import call, call_well


@pytest.fixture
def programs(data, tmp_path, small_disk):
    """What writes to the disk: program, arguments, and how its error begins."""
    save_untrained(tmp_path / "run", dataclasses.replace(CONFIGS["llama"], vocab_size=257))
    run = ["--load", tmp_path / "run", "--output"]
    call_well(export_hf, *run, tmp_path / "hf")
    text, byte = ROOT / "docs/reference/flags.md", ["--tokenizer-type", "ByteTokenizer"]
    tokens = ["--input", text, "--workers", 1, *byte, "--output-prefix"]
    return [
        (export_hf, [*run, small_disk / "hf"], "write"),
        (export_megatron, [*run, small_disk / "megatron"], "write"),
        (import_hf, ["--input", tmp_path / "hf", *byte, "--save", small_disk / "ours"], "write"),
        (preprocess_data, [*tokens, small_disk / "tokens"], "tokenize into"),
        (merge_datasets, ["--input", data, "--output-prefix", small_disk / "merged"], "write the dataset"),
        (
            train_tokenizer,
            ["--input", text, "--vocab-size", 4000, "--output", small_disk / "sp"],
            "write the tokenizer to",
        ),
    ]


@pytest.mark.parametrize("room", [0, 12288])
def test_a_full_disk_is_one_line_and_stays_clean(programs, small_disk, room):
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - room)
    before = sorted(small_disk.iterdir())
    for tool, argv, doing in programs:
        code, out, err = call(tool, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1), (tool, err)
        assert err.startswith(f"error: cannot {doing} {argv[-1]}") and "No space left on device" in err, err
        assert sorted(small_disk.iterdir()) == before, tool
    if room == 0:
        with pytest.raises(OSError, match=f"cannot write the cluster to {small_disk}/c: No space left on device"):
            write_cluster(small_disk / "c", read_cluster(ROOT / "benchmarks/results/planner_box.toml"))
