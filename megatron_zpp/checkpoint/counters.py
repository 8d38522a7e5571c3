"""How far a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .folder import CheckpointError


@dataclass
class Counters:
    """How far a run is; a checkpoint keeps it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # as the learning-rate schedule counts: skipped steps left out
    skipped_iterations: int = 0
    nan_iterations: int = 0
    average_loss: float = 0.0  # of the steps so far, moving; 0 = not asked for; see is_loss_spike

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Counters:
        """A checkpoint's. Raises CheckpointError for those of another version."""
        try:
            return cls(**meta["counters"])
        except TypeError as error:
            raise CheckpointError(
                f"the checkpoint's counters are of another version of megatron_zpp ({error})"
            ) from error
