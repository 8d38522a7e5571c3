"""Runs a program that trains on ranks which share one device, through the staging backend.

``torchrun --nproc-per-node 4 tests/gpu/share_device.py cuda:0 pretrain_gpt.py FLAGS``
"""

import runpy
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_zpp.parallel import distributed
from tests.gpu.staged_backend import NAME, register


def init_distributed(backend: str | None, timeout_minutes: float) -> torch.device:
    """In place of the trainer's, which gives each rank a GPU of its own."""
    register()
    dist.init_process_group(NAME, timeout=timedelta(minutes=timeout_minutes))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


device, script = torch.device(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(script).parent))  # as Python does for a script
distributed.init_distributed = init_distributed  # before a program imports it
runpy.run_path(script, run_name="__main__")
