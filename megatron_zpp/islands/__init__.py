"""DiLoCo for any model, sharded by PyTorch FSDP2 or not. Needs torch alone."""

from .api import Islands, apply_islands
from .config import IslandConfig
from .emulation import EmulatedIslands, emulate_islands
from .interface import IslandsInterface, LeavingInterface, NoIslands

__all__ = [
    "EmulatedIslands",
    "IslandConfig",
    "Islands",
    "IslandsInterface",
    "LeavingInterface",
    "NoIslands",
    "apply_islands",
    "emulate_islands",
]
