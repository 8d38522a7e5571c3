"""What is refused at once: sizes beyond memory, files that never end, and routers that learn nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.convert.hf.files import WeightFiles, from_hf_config
from megatron_zpp.families import ARCHITECTURES, GPT, LLAMA
from megatron_zpp.files import LARGEST_TEXT, read_bounded
from megatron_zpp.planning.cluster import read_cluster
from tests.convert.hf.small_models import CONFIGS, to_hf_config
from tests.training.small_run import flags


def test_a_router_of_one_expert_learns_from_scores_of_all():
    argv = flags("nowhere", "--num-experts 4 --moe-router-topk 1")
    with pytest.raises(SettingsError, match="learns nothing from the loss: give --moe-router-pre-softmax too"):
        parse_settings(LLAMA, argv, note=lambda text: None)
    for more in ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid"):
        parse_settings(LLAMA, [*argv, *more.split()], note=lambda text: None)


def test_sizes_are_checked_before_memory_is_asked_for():
    with pytest.raises(SettingsError, match="--seq-length must be at most"):
        parse_settings(GPT, flags("nowhere", "--seq-length 4000000000"), note=lambda text: None)
    with pytest.raises(ValueError, match="num_layers is 1000000000"):
        from_hf_config(to_hf_config(CONFIGS["llama"]) | {"num_hidden_layers": 10**9}, ARCHITECTURES)


def test_files_that_never_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    for read in (read_bounded, read_cluster):
        for path in (Path("/dev/zero"), tmp_path / "pipe"):
            with pytest.raises(ValueError, match="is no regular file"):
                read(path)
        with pytest.raises(ValueError, match="the limit is"):
            read(tmp_path / "large")
    with pytest.raises(SettingsError, match="is no regular file"):
        parse_settings(GPT, flags("nowhere", "--deepspeed_config /dev/zero"), note=lambda text: None)
    (tmp_path / "pipe").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no regular file"):
        WeightFiles(tmp_path)
