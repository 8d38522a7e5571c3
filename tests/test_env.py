"""``python -m megatron_zpp.commands.env``."""

import sys

import pytest
import torch

from megatron_zpp.zeropp.wire import kernels
from tests.tools import run


def run_env(**environment):
    return run(sys.executable, "-m", "megatron_zpp.commands.env", **environment).stdout


def test_it_reports_versions_devices_and_the_path_of_each_operator():
    lines = dict(line.split("  ", 1) for line in run_env().splitlines())
    assert torch.__version__ in lines["torch"]
    assert "lo" in lines["interfaces"].split()[0]
    assert all("compiled" in lines[f"{operator} on cpu"] for operator in kernels.OPERATORS)


@pytest.mark.long
def test_it_says_why_plain_torch_runs(tmp_path):
    lines = dict(line.split("  ", 1) for line in run_env(ZEROPP_KERNELS="off").splitlines())
    assert "plain torch: switched off by ZEROPP_KERNELS=off" in lines["encode on cpu"]
    missing = tmp_path / "missing.so"
    assert f"there is no {missing}" in run_env(ZEROPP_KERNELS=str(missing))
    missing.write_bytes(b"not a library")
    assert "was built for another torch" in run_env(ZEROPP_KERNELS=str(missing))
