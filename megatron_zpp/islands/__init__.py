"""DiLoCo for any model, sharded by PyTorch FSDP2 or not. Needs torch alone."""

from .api import Islands, apply_islands
from .config import IslandConfig
from .interface import IslandsInterface

__all__ = ["IslandConfig", "Islands", "IslandsInterface", "apply_islands"]
