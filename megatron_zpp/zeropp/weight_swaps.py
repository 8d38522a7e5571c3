"""Other weights for a while: moving averages (EMA) that are evaluated, checkpoints that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .interface import ZeroPPInterface


@contextmanager
def swapped_weights(zeropp: ZeroPPInterface) -> Iterator[None]:
    """Let weights that the program writes in here travel in full, and those that it has put back by the end, too."""
    zeropp.invalidate()
    try:
        yield
    finally:
        zeropp.invalidate()
