"""DiLoCo for any model, sharded by PyTorch FSDP2 or not. Needs torch alone."""

from .api import apply_islands as apply_islands
from .config import IslandConfig as IslandConfig
from .outer_sync import OuterSync as OuterSync
