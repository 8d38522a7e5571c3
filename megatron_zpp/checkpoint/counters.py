"""How far a run is."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .files import CheckpointError


@dataclass
class Counters:
    """How far a run is; a checkpoint keeps it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # as the learning-rate schedule counts: skipped steps left out
    skipped_iterations: int = 0
    nan_iterations: int = 0
    cut_tokens: int = 0  # that a curriculum left out of scheduled_samples
    average_loss: float = 0.0  # of the steps so far, moving; 0 = not asked for

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Counters:
        """A checkpoint's. Raises CheckpointError for those of another version, or without sense."""
        saved, later = meta["counters"], {"average_loss", "cut_tokens"}  # earlier versions had none
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted((saved.keys() | later) ^ names)
        wrong += [name for name in sorted(names - later - {*wrong}) if type(saved[name]) is not int]
        if wrong or saved["iteration"] != meta["iteration"]:
            raise CheckpointError(
                "the checkpoint's counters are damaged, or of another version of megatron_zpp: "
                f"{reprlib.repr(', '.join(wrong or ['iteration']))}"
            )
        return cls(**saved)

    def is_loss_spike(self, loss: float, factor: float | None) -> bool:
        """Return whether a finite loss is more than ``factor`` times the average, which then moves towards it.

        A spike moves the average no further than its own limit does, so that a loss that stays high is soon believed.
        factor: --loss-spike-factor; None asks for nothing.
        """
        if factor is None:
            return False
        average = self.average_loss or loss
        self.average_loss = 0.98 * average + 0.02 * min(loss, factor * average)
        return loss > factor * average
