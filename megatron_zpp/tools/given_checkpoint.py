"""The checkpoint that a tool exports: found, and verified before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint import CheckpointError, find_checkpoint, problems, read_meta
from megatron_zpp.metrics.progress import progress


def checkpoint_to_export(load: str, iteration: int | None) -> tuple[Path, dict[str, Any]]:
    """Its folder and its meta.json; iteration None: the latest. Raises CheckpointError."""
    checkpoint = find_checkpoint(load, iteration)
    if checkpoint is None:
        raise CheckpointError(f"{load} holds no checkpoint: give --load what was given to --save in training")
    with progress("verifying the checkpoint"):
        wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(wrong)}. Export another one with --ckpt-step")
    return checkpoint, read_meta(checkpoint)
