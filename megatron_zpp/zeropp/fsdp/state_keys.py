"""Keys of the states that checkpoints keep: "RANK.LAYOUT/KIND/UNIT/KEY"; of random states "RANK.DEVICE"."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def unit_prefix(kind: str, unit: str) -> str:
    """Of the keys of one unit's collective. kind: "weights" or "gradients"."""
    return f"{kind}/{unit or 'root'}/"


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What ``state`` has under keys that begin with ``prefix``, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
