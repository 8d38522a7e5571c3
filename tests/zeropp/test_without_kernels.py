"""Where the operators are not built, plain torch does the same, and says so once."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from megatron_zpp.zeropp.wire import kernels
from tests.tools import run

HERE = Path(__file__).parent


@pytest.mark.long
def test_wires_and_loco_work_in_plain_torch():
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "test_wire_format.py", "test_loco.py"]
    run(*command, folder=HERE, timeout=None, ZEROPP_KERNELS="off")


def test_a_device_without_kernels_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        kernels.warn_if_missing(torch.device("cpu"))
        assert caplog.messages == []
        kernels.warn_if_missing(torch.device("xpu"))
    assert caplog.messages == ["quantization runs in plain torch, several times slower: there are no kernels for xpu"]
