"""Counts the bytes that this rank sends, within its node and to other nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes sent by this rank since the last ``take()``, as the collectives' ring and pairwise algorithms move them.

    Summed over the ranks of a node, ``inter_node`` is what leaves the node, without the transport's own overhead.
    """

    intra_node: int = 0
    inter_node: int = 0

    def add(self, intra_node: int = 0, inter_node: int = 0) -> None:
        self.intra_node += intra_node
        self.inter_node += inter_node

    def take(self) -> Traffic:
        """Return the counts and start again from zero."""
        counts = Traffic(self.intra_node, self.inter_node)
        self.intra_node = self.inter_node = 0
        return counts
