"""Streams that run one thing after the other, and things that wait for things on other streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Span:
    """Something that ran on a stream."""

    stream: str
    start: float  # seconds
    end: float
    waited_for: Span | None  # what ended last of all that it had to wait for


class Timeline:
    """Each stream runs what it is given in that order, as soon as what it waits for is over."""

    def __init__(self) -> None:
        self._last: dict[str, Span] = {}
        # By stream, the time that others waited for it; see ``run``.
        self.exposed: defaultdict[str, float] = defaultdict(float)

    def run(self, stream: str, seconds: float, after: Iterable[Span | None] = (), watched: bool = False) -> Span:
        """Add something that takes ``seconds`` and waits for ``after``.

        watched: whoever is in the way while this stream waits is blamed for it in ``exposed``.
        """
        before = self._last.get(stream)
        waits = [span for span in (before, *after) if span is not None]
        waited_for = max(waits, key=lambda span: span.end, default=None)
        start = waited_for.end if waited_for is not None else 0.0
        if watched:
            self._blame(waited_for, before.end if before is not None else 0.0)
        self._last[stream] = span = Span(stream, start, start + seconds, waited_for)
        return span

    def _blame(self, span: Span | None, since: float) -> None:
        """Of the time from ``since`` to the end of ``span``, each part to what ran then on the way to it."""
        while span is not None and span.end > since:
            self.exposed[span.stream] += span.end - max(since, span.start)
            span = span.waited_for
