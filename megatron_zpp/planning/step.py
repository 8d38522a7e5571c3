"""One optimizer step on a timeline: when FSDP2 and ZeRO++ start what, and what waits for what.

The device computes on one stream, in order. Gathers and reductions have a stream each, and links carry one collective
after the other. Comments name the methods that this follows: FSDP2's hooks (torch/distributed/fsdp/_fully_shard), and
``zeropp/gather/all_gather.py`` and ``reduce_scatter.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

WITHIN, BETWEEN = "within nodes", "between nodes"  # the links
COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"  # the streams of a device
SIMULATED = 4  # micro-batches; from the third on, all take equally long


@dataclass(frozen=True, eq=False)
class Span:
    """One piece of work on a stream."""

    stream: str
    start: float  # seconds
    end: float
    waited_for: Span | None  # the last to end of those that it waited for


@dataclass(frozen=True)
class Transfer:
    """A collective, and the kernels before and after it, in seconds."""

    link: str
    seconds: float
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class UnitTimes:
    """One FSDP2 unit in one micro-batch, in seconds."""

    gather: Transfer
    stays_gathered: bool  # between its forward and its backward pass
    reduce: Transfer | None = None
    weights_between: Transfer | None = None  # hpZ's, once per step
    gradients_between: Transfer | None = None  # qgZ's, with the last micro-batch; encoding includes the node's sum
    all_reduce: Transfer | None = None  # of HSDP's replicas, with the last micro-batch
    forward: float = 0.0
    backward: float = 0.0  # with recomputation
    # Collectives that its arithmetic waits for: of tensor, context and expert parallelism.
    in_forward: tuple[Transfer, ...] = ()
    in_backward: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class StepShape:
    """The work of one step."""

    units: tuple[UnitTimes, ...]  # in the order of the forward pass
    micro_batches: int
    zero_stage: int
    head_forward: float  # the output layer and the loss, after the last unit
    head_backward: float
    optimizer: float
    overlaps: bool = True  # False, as with gloo: wait for collectives at once, except ZeRO++'s between nodes
    idle_micro_batches: float = 0.0  # a pipeline stage idles for the time of this many


@dataclass
class StepTime:
    """Seconds of a step, by the device's work or wait."""

    compute: float = 0.0  # forward and backward passes
    compression: float = 0.0  # encoding and decoding
    optimizer: float = 0.0
    exposed_within: float = 0.0  # waiting for links within the node
    exposed_between: float = 0.0
    bubble: float = 0.0  # waiting for other stages of a pipeline
    exposed_islands: float = 0.0  # waiting for other islands, a mean over an interval

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


def simulate(shape: StepShape) -> StepTime:
    """Simulate a few micro-batches of a step, and continue their steady state."""
    if shape.micro_batches <= SIMULATED:
        found = _Step(shape, shape.micro_batches).run()
    else:
        last, before = (_Step(shape, count).run() for count in (SIMULATED, SIMULATED - 1))
        more = shape.micro_batches - SIMULATED
        found = StepTime(**{name: value + more * (value - getattr(before, name)) for name, value in vars(last).items()})
    working = found.seconds - found.optimizer
    found.bubble = shape.idle_micro_batches * working / shape.micro_batches
    return found


@dataclass
class _Step:
    """Streams that run their work in order."""

    shape: StepShape
    micro_batches: int
    last: dict[str, Span] = field(default_factory=dict)  # of each stream
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds waited for streams
    time: StepTime = field(default_factory=StepTime)
    stolen: float = 0.0  # kernels on other streams take their time from the device's arithmetic
    reducing: Span | None = None
    all_reducing: list[Span] = field(default_factory=list)
    arriving: dict[int, Span] = field(default_factory=dict)  # weights between nodes, by unit
    gradients: list[tuple[Span, float]] = field(default_factory=list)  # between nodes; seconds to decode

    def run(self) -> StepTime:
        for number in range(self.micro_batches):
            self.forward(is_first=number == 0)
            self.backward(is_last=number == self.micro_batches - 1)
        self.compute(0.0, [self.reducing, *self.all_reducing])  # finalize_backward
        for arrived, decode in self.gradients:  # call_after_backward, in the order of sending
            self.reducing = self.kernel(REDUCE, decode, [arrived])
        self.compute(0.0, [self.reducing])
        self.time.optimizer = self.shape.optimizer
        self.time.exposed_within = self.exposed[WITHIN]
        self.time.exposed_between = self.exposed[BETWEEN]
        self.time.compression += self.exposed[GATHER] + self.exposed[REDUCE]
        return self.time

    def add(self, stream: str, seconds: float, after: Iterable[Span | None] = (), watched: bool = False) -> Span:
        """Run work in a stream when the one before and ``after`` have ended. watched: count the wait in ``exposed``."""
        before = self.last.get(stream)
        waited_for = max((span for span in (before, *after) if span), key=lambda span: span.end, default=None)
        start = waited_for.end if waited_for is not None else 0.0
        if watched:  # divide the wait among the streams of the work that led to it
            since, blamed = before.end if before is not None else 0.0, waited_for
            while blamed is not None and blamed.end > since:
                self.exposed[blamed.stream] += blamed.end - max(since, blamed.start)
                blamed = blamed.waited_for
        self.last[stream] = span = Span(stream, start, start + seconds, waited_for)
        return span

    def forward(self, is_first: bool) -> None:
        units = self.shape.units
        if is_first:
            for number, unit in enumerate(units):  # send all when the forward pass begins
                if unit.weights_between is not None:
                    encoded = self.kernel(GATHER, unit.weights_between.encode, [])
                    self.arriving[number] = self.add(BETWEEN, unit.weights_between.seconds, [encoded])
        copied: list[Span] = []
        for number, unit in enumerate(units):
            has_gather = is_first or self.shape.zero_stage == 3
            # A gather begins when the unit before the last one was copied out (wait_for_unshard).
            gathered = self.gather(number, copied[-2:-1]) if has_gather else None
            copied.append(self.compute(0.0, [gathered]))
            self.work(unit.forward, unit.in_forward)
        self.compute(self.shape.head_forward)

    def backward(self, is_last: bool) -> None:
        self.compute(self.shape.head_backward)
        order = range(len(self.shape.units) - 1, -1, -1)
        gathered = self.gather_again(order[0], self.compute(0.0))
        for number, following in zip_longest(order, order[1:]):
            copied = self.compute(0.0, [gathered])
            gathered = self.gather_again(following, copied)  # _backward_prefetch
            unit = self.shape.units[number]
            self.work(unit.backward, unit.in_backward)
            if is_last or self.shape.zero_stage >= 2:
                self.reduce(unit, is_last)

    def gather_again(self, number: int | None, after: Span) -> Span | None:
        """Gather the unit for its backward pass; None if it stayed gathered."""
        if number is None or self.shape.units[number].stays_gathered:
            return None
        return self.gather(number, [after])

    def gather(self, number: int, after: Sequence[Span]) -> Span:
        unit = self.shape.units[number]
        if number in self.arriving:
            assert unit.weights_between is not None
            arrived = self.arriving.pop(number)
            after = [self.kernel(GATHER, unit.weights_between.decode, [*after, arrived])]
        return self.transfer(GATHER, unit.gather, after)

    def reduce(self, unit: UnitTimes, is_last: bool) -> None:
        ended: Span | None = self.compute(0.0, [self.reducing])  # post_backward: one reduction at a time
        if unit.reduce is not None:
            ended = self.transfer(REDUCE, unit.reduce, [ended])
        if is_last and unit.gradients_between is not None:
            ended = self.kernel(REDUCE, unit.gradients_between.encode, [ended])
            sent = self.add(BETWEEN, unit.gradients_between.seconds, [ended])
            self.gradients.append((sent, unit.gradients_between.decode))
        if is_last and unit.all_reduce is not None:
            self.all_reducing.append(self.transfer("all-reduce", unit.all_reduce, [ended]))
        self.reducing = ended

    def work(self, seconds: float, transfers: Sequence[Transfer]) -> None:
        """Run arithmetic, and the collectives that it waits for."""
        self.compute(seconds)
        for transfer in transfers:
            self.compute(0.0, [self.transfer(COMPUTE, transfer, [])])

    def compute(self, seconds: float, after: Sequence[Span | None] = ()) -> Span:
        if seconds > 0:
            self.time.compute += seconds
            self.time.compression += self.stolen
            seconds, self.stolen = seconds + self.stolen, 0.0
        return self.add(COMPUTE, seconds, after, watched=True)

    def kernel(self, stream: str, seconds: float, after: Sequence[Span | None]) -> Span:
        """Run encoding or decoding."""
        if not self.shape.overlaps or stream == COMPUTE:
            self.time.compression += seconds
            return self.add(COMPUTE, seconds, after, watched=True)
        self.stolen += seconds
        return self.add(stream, seconds, after)

    def transfer(self, stream: str, transfer: Transfer, after: Sequence[Span | None]) -> Span:
        """Run a collective. Its stream waits for it; without overlap the device does."""
        encoded = self.kernel(stream, transfer.encode, after)
        sent = self.add(transfer.link, transfer.seconds, [encoded])
        return self.kernel(stream, transfer.decode, [sent])
