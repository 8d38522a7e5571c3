"""What a program did on one device, in the order in which its host asked for it. Plain records, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line of source, and the function that it is in."""

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.function}: {self.text}"


Site = tuple[Line, ...]  # the innermost line, and the one that called its function


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of one block of memory. A storage that is freed and filled again has a new block."""

    memory: int
    start: int
    stop: int


@dataclass(frozen=True)
class Operation:
    """A kernel, or a collective's."""

    name: str
    stream: str
    site: Site
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True)
class Allocation:
    """The caching allocator gives out memory: perhaps what this stream's operations used until it was given back."""

    memory: int
    stream: str
    site: Site


@dataclass(frozen=True)
class Release:
    """The program gives memory back; the allocator may give it out again to the stream it was allocated on."""

    memory: int
    stream: str


@dataclass(frozen=True)
class RecordStream:
    """``Tensor.record_stream``: the allocator keeps the memory until that stream is done with it."""

    memory: int
    stream: str
    site: Site


@dataclass(frozen=True)
class Record:
    """An event that stands for all that the stream was asked to do so far."""

    event: int
    stream: str


@dataclass(frozen=True)
class Wait:
    """A stream, or the host, goes on when an event has passed. ``site`` is None where no program asked for it."""

    stream: str | None  # None = the host
    event: int
    site: Site | None


Step = Operation | Allocation | Release | RecordStream | Record | Wait
Trace = list[Step]


def waits(trace: Trace) -> list[Site]:
    """The lines that order one stream, or the host, after another stream, or keep memory for it."""
    steps = (step for step in trace if isinstance(step, Wait | RecordStream))
    return list(dict.fromkeys(step.site for step in steps if step.site is not None))
