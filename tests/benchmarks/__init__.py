"""Programs of benchmarks/ import each other by name, as Python finds them when it starts one of them."""

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
