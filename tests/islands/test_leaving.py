"""What an island that may leave is refused. Those that run need torchft: tests/integrations/test_leaving_islands.py."""

import subprocess
import sys

import pytest

from megatron_zpp.islands.membership import Membership
from tests.conftest import ROOT


@pytest.mark.parametrize(
    "values, message",
    [
        ({"island": 3, "num_islands": 3}, "island must be below 3, got 3"),
        ({"island": -1, "num_islands": 3}, "island must be at least 0, got -1"),
        ({"island": 0, "num_islands": 0}, "num_islands must be at least 1, got 0"),
        ({"island": 0, "num_islands": 2, "timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"island": 0, "num_islands": 2, "patience": float("nan")}, "patience must be a finite number, got nan"),
    ],
)
def test_a_membership_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        Membership(**values)


def test_without_torchft_one_line_names_it():
    program = "import sys; sys.modules['torchft'] = None; import megatron_zpp.islands.leaving"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: islands that come and go need the package torchft: pip install torchft, or megatron_zpp's extra "
        "islands"
    )
