"""The checker's analysis against the definition: paths in the graph of what comes before what."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.zeropp.order.races import find_races
from tests.zeropp.order.trace import (
    Allocation,
    Line,
    Operation,
    Record,
    RecordStream,
    Release,
    Span,
    Trace,
    Wait,
    waits,
)

STREAMS = ("a", "b", "c")
HALVES = (Span(0, 0, 4), Span(0, 4, 8), Span(0, 0, 8))


def site(number: int):
    return (Line("program.py", number, "main", ""),)


def some_trace(seed: int) -> Trace:
    """A few blocks, each allocated, used, released at some time; events that may be waited for."""
    draw = random.Random(seed)
    trace: Trace = []
    live: dict[int, str] = {}
    blocks, events = 0, 0
    for number in range(draw.randint(1, 25)):
        stream = draw.choice(STREAMS)
        kind = draw.choice(["use", "use", "use", "allocate", "release", "keep", "record", "wait", "wait", "host"])
        if kind == "allocate" or not live:
            trace.append(Allocation(blocks, stream, site(number)))
            live[blocks] = stream
            blocks += 1
        elif kind == "use":
            spans = [replace(draw.choice(HALVES), memory=draw.choice(sorted(live))) for _ in range(draw.randint(1, 2))]
            writes = draw.randint(0, len(spans))
            trace.append(Operation(f"op{number}", stream, site(number), tuple(spans[writes:]), tuple(spans[:writes])))
        elif kind == "keep":
            trace.append(RecordStream(draw.choice(sorted(live)), stream, site(number)))
        elif kind == "release":
            block = draw.choice(sorted(live))
            trace.append(Release(block, live.pop(block)))
        elif kind == "record" or not events:
            trace.append(Record(events, stream))
            events += 1
        else:
            trace.append(Wait(None if kind == "host" else stream, draw.randrange(events), site(number)))
    return trace


def comes_before(trace: Trace) -> list[set[int]]:
    """For each step, the steps that are done when it begins (for a host's wait: when it ends)."""
    before: list[set[int]] = []
    records = {step.event: i for i, step in enumerate(trace) if isinstance(step, Record)}
    for i, step in enumerate(trace):
        stream = getattr(step, "stream", None)
        direct = {
            j
            for j, other in enumerate(trace[:i])
            if (getattr(other, "stream", None) == stream and not isinstance(other, RecordStream | Release))
            or (isinstance(other, Wait) and other.stream is None)
        }
        if isinstance(step, Wait):
            direct.add(records[step.event])
        before.append(direct.union(*(before[j] for j in direct)))
    return before


def races_by_definition(trace: Trace) -> set[tuple[int, int]]:
    before = comes_before(trace)
    operations = [(i, step) for i, step in enumerate(trace) if isinstance(step, Operation)]
    races = set()
    for j, second in operations:
        for i, first in operations:
            if i < j and i not in before[j]:
                pairs = [(a, b) for a in first.writes for b in second.reads + second.writes]
                pairs += [(a, b) for a in first.reads for b in second.writes]
                if any(a.memory == b.memory and a.start < b.stop and b.start < a.stop for a, b in pairs):
                    races.add((i, j))
    for i, step in enumerate(trace):
        if not isinstance(step, Allocation):
            continue
        # The block may be one that this stream's operations used: whoever uses it comes after them.
        earlier = {k for k, operation in operations if k < i and operation.stream == step.stream}
        for j, user in operations:
            if any(span.memory == step.memory for span in user.reads + user.writes) and earlier - before[j] - {j}:
                races.add((i, j))
        # It may be one that was released on this stream, and not given out again since.
        since = max(
            (k for k in range(i) if isinstance(trace[k], Allocation) and trace[k].stream == step.stream), default=0
        )
        for k in range(since, i):
            released = trace[k]
            if isinstance(released, Release) and released.stream == step.stream:
                for j, user in operations:
                    uses = any(span.memory == released.memory for span in user.reads + user.writes)
                    keeps = any(
                        isinstance(other, RecordStream)
                        and (other.memory, other.stream) == (released.memory, user.stream)
                        for other in trace[:k]
                    )
                    if uses and not keeps and j < i and j not in before[i] and user.stream != step.stream:
                        races.add((j, i))
    return races


def test_races_are_those_of_the_definition():
    """Of several races one may hide another; but none is invented, and none is missed altogether."""
    num_racing = 0
    for seed in range(500):
        trace = some_trace(seed)
        found = {(race.first.site[0].number, race.second.site[0].number) for race in find_races(trace)}
        expected = races_by_definition(trace)
        assert found <= expected, seed
        assert bool(found) == bool(expected), seed
        num_racing += bool(found)
    assert 100 < num_racing < 400  # both kinds of traces are among them


def test_what_one_line_waits_for_can_be_left_out():
    for seed in range(100):
        trace = some_trace(seed)
        for line in waits(trace):
            rest = [step for step in trace if getattr(step, "site", None) != line]
            assert find_races(trace, without=line) == find_races(rest), seed
