"""DiLoCo for any model, sharded by PyTorch FSDP2 or not. Needs torch alone."""

from .api import apply_islands
from .config import IslandConfig
from .outer_sync import OuterSync

__all__ = ["IslandConfig", "OuterSync", "apply_islands"]
