"""The flags of ZeRO++ and LoCo are the fields of their configs: scripts, DeepSpeed files and checkpoints know them by
these names, so that none may change unnoticed."""

import dataclasses
import re

import pytest

from megatron_zpp.settings.flags import flat_values, group_from, iterate_flags
from megatron_zpp.settings.groups import all_flags
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.conftest import ROOT

FLAGS = {  # name: type of a value, default, choices
    "--zero-quantized-weights": (bool, False, None),
    "--zero-hpz-partition-size": (int, 1, None),
    "--zero-quantized-gradients": (bool, False, None),
    "--zeropp-ranks-per-node": (int, None, None),
    "--zeropp-weight-bits": (int, 8, None),
    "--zeropp-weight-intra-bits": (int, None, None),
    "--zeropp-weight-block-size": (int, 256, None),
    "--zeropp-gradient-bits": (int, 4, None),
    "--zeropp-gradient-intra-bits": (int, 8, None),
    "--zeropp-gradient-block-size": (int, 128, None),
    "--zeropp-weight-rounding": (str, "nearest", ("nearest", "stochastic")),
    "--zeropp-gradient-rounding": (str, "nearest", ("nearest", "stochastic")),
    "--zeropp-gradient-sum-dtype": (str, "fp32", ("fp32", "bf16", "int8")),
    "--zeropp-offload-gradient-sums": (bool, False, None),
    "--zeropp-secondary-dtype": (str, "16bit", ("16bit", "int8")),
    "--zeropp-weight-scaling": (str, "absmax", ("absmax", "mean")),
    "--zeropp-weight-intra-scaling": (str, "absmax", ("absmax", "mean")),
    "--zeropp-gradient-scaling": (str, None, ("absmax", "mean")),
    "--zeropp-gradient-intra-scaling": (str, None, ("absmax", "mean")),
    "--zeropp-scale-dtype": (str, "fp32", ("fp32", "bf16")),
    "--zeropp-gradient-bits-warmup": (str, None, None),
    "--zeropp-hadamard": (bool, False, None),
    "--zeropp-check-agreement": (bool, False, None),
    "--zeropp-loco": (bool, False, None),
    "--zeropp-loco-beta": (float, 0.8, None),
    "--zeropp-loco-reset-interval": (int, 1024, None),
    "--zeropp-loco-reset": (str, "hard", ("hard", "decay")),
    "--zeropp-loco-hops": (str, "inter", ("inter", "both")),
    "--zeropp-loco-error-dtype": (str, "int8", ("int8", "bf16", "fp32")),
}
ZERO_MEANS_NONE = {
    "zeropp_weight_intra_bits", "zeropp_weight_block_size", "zeropp_gradient_bits", "zeropp_gradient_intra_bits",
    "zeropp_gradient_block_size", "zeropp_loco_reset_interval",
}  # fmt: skip
NEEDS = {
    "zero_quantized_weights": {
        "zeropp_weight_bits", "zeropp_weight_intra_bits", "zeropp_weight_block_size", "zeropp_weight_rounding",
        "zeropp_weight_scaling",
    },
    "zeropp_weight_intra_bits": {"zeropp_weight_intra_scaling"},
    "zero_quantized_gradients": {
        "zeropp_gradient_bits", "zeropp_gradient_intra_bits", "zeropp_gradient_block_size", "zeropp_gradient_rounding",
        "zeropp_gradient_scaling", "zeropp_gradient_intra_scaling", "zeropp_hadamard", "zeropp_gradient_sum_dtype",
        "zeropp_offload_gradient_sums", "zeropp_loco", "zeropp_gradient_bits_warmup",
    },
    "zeropp_loco": {
        "zeropp_loco_beta", "zeropp_loco_reset_interval", "zeropp_loco_reset", "zeropp_loco_hops",
        "zeropp_loco_error_dtype",
    },
    "group_query_attention": {"num_query_groups"},
}  # fmt: skip


def test_names_types_defaults_and_choices_are_those_that_scripts_rely_on():
    flags = {flag.name: flag for flag in iterate_flags(ZeroPPConfig)}
    for name, expected in FLAGS.items():
        flag = flags[name]
        assert (flag.value_type, flag.default, flag.choices) == expected, name
        assert flag.setting == name[2:].replace("-", "_")
        assert flag.zero_is_none == (flag.setting in ZERO_MEANS_NONE), name


def test_what_needs_what():
    expected = {setting: needed for needed, settings in NEEDS.items() for setting in settings}
    for name in FLAGS.keys() | {"--num-query-groups"}:
        flag = next(flag for flag in all_flags().values() if flag.name == name)
        assert flag.needs == expected.get(flag.setting), name


def test_every_field_is_a_flag_but_those_that_the_trainer_sets():
    fields = [*dataclasses.fields(ZeroPPConfig), *dataclasses.fields(LoCoConfig)]
    assert [field.name for field in fields if not field.metadata] == ["seed", "exact_undo"]


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
    page = (ROOT / "docs/zeropp.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in page.splitlines() if re.match(r"\| `\w+`.* \| `--", row)]
    of_field = {field.name: field.metadata["name"] for field in dataclasses.fields(ZeroPPConfig) if field.metadata}
    assert len(rows) > 10
    for fields, flags in rows:
        assert [of_field[name] for name in re.findall(r"`(\w+)`", fields)] == re.findall(r"`(--[\w-]+)", flags)
