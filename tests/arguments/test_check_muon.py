"""What --optimizer muon does not work with is refused, by name."""

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT
from tests.training.small_run import flags


@pytest.mark.parametrize(
    "more, world_size, message",
    [
        ("--tensor-model-parallel-size 2", 2, "leave --tensor-model-parallel-size out"),
        ("--num-experts 2 --disable-bias-linear", 1, "leave --num-experts out"),
        ("--cpu-offload", 2, "leave --cpu-offload out"),
        ("--zero-stage 0", 2, "--optimizer muon needs --zero-stage 1, 2 or 3"),
        ("--use-apex", 2, "leave --use-apex out"),
        ("--muon-stale-rows", 2, "give a --muon-period above 1"),
        ("--muon-momentum-bits 7", 2, "--muon-momentum-bits must be one of 1, 2, 3, 4"),
    ],
)
def test_what_muon_does_not_work_with(more: str, world_size: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(GPT, flags("data", "--optimizer muon", more), world_size)


@pytest.mark.parametrize("flag", ["--muon-tp-mode blockwise", "--muon-fp32-matmul-prec high", "--muon-no-split-qkv"])
def test_flags_of_megatron_that_change_nothing_here(flag: str) -> None:
    notes: list[str] = []
    settings = parse_settings(GPT, flags("data", "--optimizer muon", flag), 1, notes.append)
    assert settings.optimizer.optimizer == "muon"
    assert any(flag.split()[0] in note for note in notes)
