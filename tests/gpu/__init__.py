"""What runs on a GPU where there is one, and is listed as skipped where there is none."""

import pytest
import torch

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
on_devices = pytest.mark.parametrize("device", ["cpu", CUDA])
