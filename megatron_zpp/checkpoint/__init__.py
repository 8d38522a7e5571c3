"""Checkpoints on torch.distributed.checkpoint: exact, atomic, verified, without pickle."""

from .files import CheckpointError
from .folder import FolderLock, candidates, find_checkpoint, is_complete
from .meta import nonfinite, read_meta
from .saver import CheckpointSaver
from .state import iterate_parameters, load_checkpoint
from .storage import iterate_tensors, save_parameters
from .trained import Trained
from .verify import latest_good, problems, problems_on_all_ranks

__all__ = [
    "CheckpointError",
    "CheckpointSaver",
    "FolderLock",
    "Trained",
    "candidates",
    "find_checkpoint",
    "is_complete",
    "iterate_parameters",
    "iterate_tensors",
    "latest_good",
    "load_checkpoint",
    "nonfinite",
    "problems",
    "problems_on_all_ranks",
    "read_meta",
    "save_parameters",
]
