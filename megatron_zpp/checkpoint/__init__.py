"""Checkpoints on torch.distributed.checkpoint: exact, atomic, verified, without pickle."""

from .files import CheckpointError as CheckpointError
from .folder import FolderLock as FolderLock
from .folder import candidates as candidates
from .folder import find_checkpoint as find_checkpoint
from .folder import is_complete as is_complete
from .folder import require_checkpoint as require_checkpoint
from .index import problems as problems
from .meta import read_meta as read_meta
from .saver import CheckpointSaver as CheckpointSaver
from .state import load_base as load_base
from .state import load_checkpoint as load_checkpoint
from .storage import iterate_parameters as iterate_parameters
from .storage import iterate_tensors as iterate_tensors
from .storage import save_tensors as save_tensors
from .trained import Trained as Trained
