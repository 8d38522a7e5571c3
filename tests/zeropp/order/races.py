"""Finds, in what a program did, operations on the same memory of which none has to wait for the other."""

from collections import defaultdict
from dataclasses import dataclass

from tests.zeropp.order.trace import Allocation, Operation, Record, RecordStream, Release, Site, Span, Trace, Wait

# By stream, how many of its operations are known to be done: a vector clock.
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """An operation's use of a span; or the allocation of the block, which must come before all of its uses."""

    name: str
    stream: str
    number: int  # place of the operation on its stream
    site: Site
    span: Span
    writes: bool


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory in no order, at least one of which writes."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{_describe(self.first)}\n    in no order with {_describe(self.second)}"


def _describe(access: Access) -> str:
    use = "writes" if access.writes else "reads"
    return f"{access.name} {use} on {access.stream}, at " + ", called from ".join(map(str, access.site))


def find_races(trace: Trace, without: Site | None = None) -> list[Race]:
    """The races of a trace, one for each pair of lines; ``without`` what one line waits for or keeps.

    Two operations are in order if they are on one stream, if the host waited for the one before it asked for the
    other, or if events say so. A trace knows one order of the host's requests, and speaks for every speed of the
    streams.
    """
    clocks: dict[str, Clock] = defaultdict(dict)
    host: Clock = {}
    events: dict[int, Clock] = {}
    counts: dict[str, int] = defaultdict(int)
    accesses: dict[int, list[Access]] = defaultdict(list)  # by block; those that some access to come may race with
    kept: dict[int, set[str]] = defaultdict(set)  # by block, the streams of ``record_stream``
    released: dict[str, list[int]] = defaultdict(list)  # by stream, blocks that it may get again
    races: dict[tuple[str, Site, str, Site], Race] = {}

    def known_on(stream: str) -> Clock:
        """Return the operations that are done when the stream has done all that it was asked for until now."""
        clock = clocks[stream]
        _join(clock, host)
        clock[stream] = counts[stream]
        return clock

    def report(first: Access, second: Access) -> None:
        races.setdefault((first.name, first.site, second.name, second.site), Race(first, second))

    def use(access: Access) -> None:
        clock, others = clocks[access.stream], []
        for other in accesses[access.span.memory]:
            is_done = clock.get(other.stream, 0) >= other.number
            if not is_done and _overlap(other.span, access.span) and (other.writes or access.writes):
                report(other, access)
            # What comes after this access comes after the other one: it need not be looked at again.
            if not (is_done and _covers(access.span, other.span) and (access.writes or not other.writes)):
                others.append(other)
        accesses[access.span.memory] = [*others, access]

    for step in trace:
        match step:
            case Operation(name, stream, site, reads, writes):
                counts[stream] += 1
                known_on(stream)
                for span in reads:
                    use(Access(name, stream, counts[stream], site, span, writes=False))
                for span in writes:
                    use(Access(name, stream, counts[stream], site, span, writes=True))
            case Allocation(memory, stream, site):
                clock = known_on(stream)
                taken = Access("an allocation", stream, counts[stream], site, Span(memory, 0, 1 << 62), writes=True)
                for old in released.pop(stream, []):
                    for other in accesses.pop(old, []):
                        if clock.get(other.stream, 0) < other.number and other.stream not in kept[old]:
                            report(other, taken)
                accesses[memory] = [taken]
            case Release(memory, stream):
                released[stream].append(memory)
            case RecordStream(memory, stream, site) if site != without:
                kept[memory].add(stream)
            case Record(event, stream):
                events[event] = dict(known_on(stream))
            case Wait(stream, event, site) if site is None or site != without:
                _join(host if stream is None else clocks[stream], events[event])
    return list(races.values())


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


def _covers(a: Span, b: Span) -> bool:
    return a.start <= b.start and b.stop <= a.stop
