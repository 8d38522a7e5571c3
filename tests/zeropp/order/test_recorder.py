"""Programs of a few lines with a race, each beside one without: what is recorded, and what is taken for ordered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.ranks import run_ranks
from tests.zeropp.order.races import find_races
from tests.zeropp.order.recorder import Recorder, Stream


def num_races(program, *args) -> int:
    with Recorder() as recorder:
        side = torch.cpu.Stream()
        program(side, *args)
        torch.empty(1)  # what the default stream released is given out again
    return len(find_races(recorder.trace))


def nothing(side: Stream) -> None:
    pass


def wait_stream(side: Stream) -> None:
    torch.cpu.current_stream().wait_stream(side)


def wait_event(side: Stream) -> None:
    event = torch.cpu.Event()
    event.record(side)
    event.wait()


def host_event(side: Stream) -> None:
    side.record_event().synchronize()


def host_device(side: Stream) -> None:
    torch.cpu.synchronize()


def host_number(side: Stream) -> None:
    with torch.cpu.stream(side):
        torch.ones(1).item()


def the_wrong_way(side: Stream) -> None:
    side.wait_stream(torch.cpu.current_stream())


def an_old_event(side: Stream) -> None:
    torch.cpu.current_stream().wait_event(OLD_EVENTS[0])


OLD_EVENTS = []
ORDERS = (wait_stream, wait_event, host_event, host_device, host_number)
NO_ORDERS = (nothing, the_wrong_way, an_old_event)


def write_aside_and_read(side: Stream, order) -> None:
    x = torch.zeros(8)
    OLD_EVENTS[:] = [side.record_event()]
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        x[:4] = 1
    order(side)
    assert x.sum() == 4  # at once, whatever the order


def read_aside_and_write(side: Stream, order) -> None:
    x = torch.zeros(8)
    OLD_EVENTS[:] = [side.record_event()]
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        y = x + 1
    order(side)
    torch._foreach_add_([x], 1.0)
    assert y.sum() == 8


def read_aside_and_release(side: Stream, order) -> None:
    """The memory of x is the default stream's, which gives it out again: order must come before that."""
    x = torch.zeros(8)
    OLD_EVENTS[:] = [side.record_event()]
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        y = x + 1
    del x
    order(side)
    torch.empty(8)
    assert y.sum() == 8


def shrink_and_grow(side: Stream, order) -> None:
    """As FSDP2 frees unsharded parameters: without an operator, and the tensor lives on."""
    x = torch.zeros(8)
    OLD_EVENTS[:] = [side.record_event()]
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        x.add_(1)
    x.untyped_storage().resize_(0)
    order(side)
    x.untyped_storage().resize_(32)


def allocate_and_write_aside(side: Stream, order) -> None:
    """New memory may be what the default stream was asked to use before."""
    torch.zeros(8).add_(1)
    x = torch.empty(8)
    if order not in (nothing, the_wrong_way):
        side.wait_stream(torch.cpu.current_stream())
    if order is the_wrong_way:
        torch.cpu.current_stream().wait_stream(side)
    with torch.cpu.stream(side):
        x.fill_(1)
    torch.cpu.synchronize()


def encode_aside_and_decode(side: Stream, order) -> None:
    """The operators of csrc/, or plain torch where they are not built."""
    values = torch.ones(128)
    OLD_EVENTS[:] = [side.record_event()]
    side.wait_stream(torch.cpu.current_stream())
    format = wire_format((ParameterShard("p", 128, True),), 4, 64, torch.float32)
    with torch.cpu.stream(side):
        wire = format.encode(values)
    order(side)
    assert format.decode(wire, torch.empty(128)).equal(values)


PROGRAMS = (
    write_aside_and_read,
    read_aside_and_write,
    read_aside_and_release,
    shrink_and_grow,
    encode_aside_and_decode,
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_order_by_any_means_is_order_and_anything_else_is_a_race(program):
    assert {order.__name__: num_races(program, order) for order in ORDERS} == {order.__name__: 0 for order in ORDERS}
    assert all(num_races(program, order) for order in NO_ORDERS)


def test_new_memory_is_of_the_stream_that_asked_for_it():
    assert not num_races(allocate_and_write_aside, wait_stream)
    assert num_races(allocate_and_write_aside, nothing) and num_races(allocate_and_write_aside, the_wrong_way)


def test_record_stream_keeps_memory_but_orders_nothing():
    def program(side: Stream, release: bool) -> None:
        x = torch.zeros(8)
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            y = x + 1
        x.record_stream(side)
        if not release:
            x.fill_(2)
        del x, y

    assert not num_races(program, True)
    assert num_races(program, False)


def test_other_halves_of_a_block_and_views_are_no_race():
    def program(side: Stream, halves: tuple[Tensor, Tensor]) -> None:
        with torch.cpu.stream(side):
            halves[0].add_(1)
        halves[1].view(2, 2).T.flatten(0, 0)
        halves[1].mul_(2)

    x = torch.zeros(8)
    assert not num_races(program, (x[:4], x[4:]))
    assert num_races(program, (x[:5], x[4:]))


def _works() -> dict[str, int]:
    """The races of an asynchronous all-gather, by what the program does before and after it waits."""

    def gather(case: str) -> int:
        def program(side: Stream) -> None:
            shard, out = torch.ones(4), torch.empty(8)
            work = all_gather(out, shard, async_op=True)
            if case == "read before":
                out.add(1)
            if case == "overwritten before":
                shard.zero_()
            if case == "released before":
                del shard
                torch.empty(4)
            if case == "waited for aside":
                with torch.cpu.stream(side):
                    work.wait()
            else:
                work.wait()
            assert out.sum() == 8

        return num_races(program)

    def synchronous(side: Stream) -> None:
        out = torch.empty(8)
        all_gather(out, torch.ones(4))
        assert out.sum() == 8

    cases = ("waited for", "released before", "read before", "overwritten before", "waited for aside")
    return {case: gather(case) for case in cases} | {"synchronous": num_races(synchronous)}


def test_works_are_waited_for():
    for races in run_ranks(2, _works):
        assert {case for case, number in races.items() if number == 0} == {
            "waited for",
            "released before",
            "synchronous",
        }
