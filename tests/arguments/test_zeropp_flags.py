"""The flags of ZeRO++ and LoCo are the fields of their configs."""

import dataclasses
import re

import pytest

from megatron_zpp.settings.flags import flat_values, group_from, iterate_flags
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.conftest import ROOT


def test_every_field_is_a_flag_but_those_that_the_trainer_sets():
    fields = [*dataclasses.fields(ZeroPPConfig), *dataclasses.fields(LoCoConfig)]
    assert [field.name for field in fields if not field.metadata] == ["nf4_skip", "seed", "exact_undo"]


@pytest.mark.parametrize(
    "config",
    [
        ZeroPPConfig(),
        ZeroPPConfig(True, 4, True, weight_intra_bits=6, weight_block_size=None, weight_rounding="stochastic"),
        ZeroPPConfig(quantized_gradients=True, loco=LoCoConfig(0.5, None, "decay", "both", "fp32"), hadamard=True),
    ],
    ids=["off", "weights", "loco"],
)
def test_a_config_comes_back_from_its_flat_values(config):
    values = flat_values(config)
    assert values.keys() == {flag.setting for flag in iterate_flags(ZeroPPConfig)}
    assert values["zeropp_loco"] is (config.loco is not None)
    assert group_from(ZeroPPConfig, values) == config


def test_the_page_names_fields_and_flags_that_belong_together():
    page = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in page.splitlines() if re.match(r"\| `\w+`.* \| `--", row)]
    of_field = {field.name: field.metadata["name"] for field in dataclasses.fields(ZeroPPConfig) if field.metadata}
    assert len(rows) > 10
    for fields, flags in rows:
        assert [of_field[name] for name in re.findall(r"`(\w+)`", fields)] == re.findall(r"`(--[\w-]+)", flags)
