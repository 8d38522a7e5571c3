"""Counts the bytes that this rank sends, within its node, to other nodes, and to other islands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes sent by this rank since the last ``take()``, as the collectives' ring and pairwise algorithms move them.

    Summed over the ranks of a node, ``inter_node`` is what leaves the node, without the transport's own overhead.
    """

    intra_node: int = 0
    inter_node: int = 0
    inter_island: int = 0
    _is_evaluating: bool = field(default=False, init=False, repr=False, compare=False)
    _has_own_weights: bool = field(default=True, init=False, repr=False, compare=False)

    def add(self, intra_node: int = 0, inter_node: int = 0, inter_island: int = 0, stays: bool = False) -> None:
        """``stays``: later passes use what was sent, until the parameters change, and do not send it again."""
        if not self._is_evaluating or (stays and self._has_own_weights):
            self.intra_node += intra_node
            self.inter_node += inter_node
            self.inter_island += inter_island

    @contextmanager
    def evaluating(self, own_weights: bool = True) -> Iterator[None]:
        """Count training's traffic alone: of what is sent in here, what the next training step will not send again.

        own_weights: whether those are evaluated that training goes on with; of others nothing counts.
        """
        self._is_evaluating, self._has_own_weights = True, own_weights
        try:
            yield
        finally:
            self._is_evaluating = False

    def of_levels(self) -> tuple[int, int, int]:
        """Within nodes, between nodes, between islands: as ``add`` takes them."""
        return self.intra_node, self.inter_node, self.inter_island

    def take(self) -> Traffic:
        """Return the counts and start again from zero."""
        counts = Traffic(*self.of_levels())
        self.intra_node = self.inter_node = self.inter_island = 0
        return counts
