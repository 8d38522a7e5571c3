"""Programs of a few lines with a race, each beside one without: what is recorded, and what is taken for ordered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.zeropp.order.races import find_races
from tests.zeropp.order.recorder import Recorder, Stream


def num_races(program, *args) -> int:
    with Recorder() as recorder:
        program(torch.cpu.Stream(), *args)
        torch.empty(1)  # what the default stream released is given out again
    return len(find_races(recorder.trace))


def wait_event(side: Stream, old_event) -> None:
    event = torch.cpu.Event()
    event.record(side)
    event.wait()


def host_number(side: Stream, old_event) -> None:
    with torch.cpu.stream(side):
        torch.ones(1).item()


# What orders the default stream after the side stream, and what does not.
ORDERS = {
    "wait_stream": lambda side, old_event: torch.cpu.current_stream().wait_stream(side),
    "wait_event": wait_event,
    "host event": lambda side, old_event: side.record_event().synchronize(),
    "host device": lambda side, old_event: torch.cpu.synchronize(),
    "host number": host_number,
}
NO_ORDERS = {
    "nothing": lambda side, old_event: None,
    "the wrong way": lambda side, old_event: side.wait_stream(torch.cpu.current_stream()),
    "an old event": lambda side, old_event: torch.cpu.current_stream().wait_event(old_event),
}
FORMAT = wire_format((ParameterShard("p", 128, True),), 4, 64, torch.float32)


def shrink(x: Tensor) -> None:
    """As FSDP2 frees unsharded parameters: without an operator, and the tensor lives on."""
    x.untyped_storage().resize_(0)


# On the side stream, on the default stream at once, and on the default stream when that is ordered.
PROGRAMS = {
    "write and read": (lambda x: x[:4].fill_(1), None, lambda x, y: x.sum()),
    "read and write": (lambda x: x + 1, None, lambda x, y: torch._foreach_add_([x], 1.0)),
    "shrink and grow": (lambda x: x.add_(1).sum(), shrink, lambda x, y: x.untyped_storage().resize_(512)),
    "encode and decode": (lambda x: FORMAT.encode(x), None, lambda x, y: FORMAT.decode(y, torch.empty(128))),
}


def aside(side: Stream, name: str, order) -> None:
    on_side, at_once, ordered = PROGRAMS[name]
    x, old_event = torch.zeros(128), side.record_event()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        y = on_side(x)
    if at_once is not None:
        at_once(x)
    order(side, old_event)
    ordered(x, y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_order_by_any_means_is_order_and_anything_else_is_a_race(name):
    races = {kind: num_races(aside, name, order) for kind, order in (ORDERS | NO_ORDERS).items()}
    assert {kind for kind, number in races.items() if number == 0} == ORDERS.keys()


def test_released_memory_is_given_out_to_its_stream_again():
    def program(side: Stream, order) -> None:
        x, old_event = torch.zeros(8), side.record_event()
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            x.add(1)
        del x
        order(side, old_event)
        torch.empty(8)

    assert [num_races(program, order) for order in ORDERS.values()] == [0] * len(ORDERS)
    assert all(num_races(program, order) for order in NO_ORDERS.values())


def test_new_memory_is_of_the_stream_that_asked_for_it():
    def program(side: Stream, is_ordered: bool) -> None:
        torch.zeros(8).add_(1)
        x = torch.empty(8)
        if is_ordered:
            side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            x.fill_(1)
        torch.cpu.synchronize()

    assert not num_races(program, True) and num_races(program, False)


def test_other_halves_of_a_block_and_views_are_no_race():
    def program(side: Stream, halves: tuple[Tensor, Tensor]) -> None:
        with torch.cpu.stream(side):
            halves[0].add_(1)
        halves[1].view(2, 2).T.flatten(0, 0)
        halves[1].mul_(2)

    x = torch.zeros(8)
    assert not num_races(program, (x[:4], x[4:]))
    assert num_races(program, (x[:5], x[4:]))
