"""Runs a program that trains on ranks which share one device, through the staging backend.

``torchrun --nproc-per-node 4 tests/gpu/share_device.py cuda:0 pretrain_gpt.py FLAGS``
"""

import runpy
import sys
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_zpp.parallel import distributed
from tests.gpu.staged_backend import start_group


def init_distributed(backend: str | None, timeout_minutes: float) -> torch.device:
    """In place of the trainer's, which gives each rank a GPU of its own."""
    start_group(device, timeout=timedelta(minutes=timeout_minutes))
    return device


device, script = torch.device(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(script).parent))  # as Python does for a script
distributed.init_distributed = init_distributed  # before a program imports it
runpy.run_path(script, run_name="__main__")
