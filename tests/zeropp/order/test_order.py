"""No order of streams breaks ZeRO++ under FSDP2's hooks: no race in what real programs do, on any rank.

The proof that this could fail: without any one of the waits, there are races, but for those that are said to be spare.
"""

import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.zeropp.order.programs import CONFIGS, PROGRAMS, Loop
from tests.zeropp.order.races import find_races
from tests.zeropp.order.recorder import Collective, Recorder
from tests.zeropp.order.trace import Site, Trace, waits

# The waits without which everything is still in order, and why: the functions and the beginning of the lines.
GATHER_STREAM = "it waits for the copy-in stream, which waits for the same, before each gather"
SPARE = {
    "_root_pre_forward: self._comm_ctx.all_gather_stream.wait": GATHER_STREAM,
    "_wait_all_gather_streams_on_event: self.comm_ctx.all_gather_stream.wait": GATHER_STREAM,
    "_post_forward: self._comm_ctx.all_gather_stream.wait": GATHER_STREAM,
    "_root_post_backward_final_callback: self._device_handle.current_stream().wait_event(rs_state.event)": (
        "finalize_backward has waited for later events of the same stream"
    ),
    "_wait_for_post_backward: self.device_handle.current_stream().wait_event(self._post_reduce_event)": (
        "reductions are on one stream; this is for HSDP"
    ),
    "finalize_backward: self.device_handle.current_stream().wait_event(event)": (
        "quantized gradients are added on the stream that reduced them, and the current one waits for that"
    ),
    "on_stream: stream.wait_stream(current), called from _finish": (
        "what it adds to was written on the stream, or before the backward pass"
    ),
    "on_stream: current.wait_stream(stream), called from _begin_forward_pass": (
        "the root is gathered next, on the same stream"
    ),
    "on_stream: stream.wait_stream(current), called from load_copies": "the host has read whether all have a state",
}


def _record(programs: Sequence[str], reshard, config) -> dict[str, tuple[Trace, list[Collective]]]:
    recorded = {}
    for name in programs:
        with Recorder() as recorder:
            loop = Loop(reshard, config)
            PROGRAMS[name](loop)
        recorded[name] = recorder.trace, recorder.collectives
    return recorded


def _check(programs: Sequence[str], reshard, config, plants: bool):
    """On each rank: the races of each program, on one how many without each line's waits, and the collectives."""
    races, planted, collectives = {}, {}, {}
    for name, (trace, collectives[name]) in _record(programs, reshard, config).items():
        races[name] = [str(race) for race in find_races(trace)]
        for line in waits(trace) if plants and dist.get_rank() == 0 else ():
            key = _without_program(line)
            planted[key] = planted.get(key, 0) + len(find_races(trace, without=line))
    return races, planted, collectives


def _without_program(site: Site) -> str:
    return ", called from ".join(str(line) for line in site if line.file != "programs.py")


def assert_same_order(of_ranks: Sequence[Sequence[Collective]]) -> None:
    """Any two ranks ask the communicators that they share for the same, in the same order over all of them."""
    for a, first in enumerate(of_ranks):
        for b, second in enumerate(of_ranks[:a]):
            shared = [[c for c in collectives if {a, b} <= set(c.ranks)] for collectives in (first, second)]
            assert shared[0] == shared[1], f"ranks {a} and {b}"
            assert shared[0]


def assert_in_order(config: str, programs: Sequence[str], plants: bool = False) -> dict[str, int]:
    results = run_ranks(4, _check, programs, *CONFIGS[config], plants, timeout=600.0)
    for rank, (races, _, _) in enumerate(results):
        assert races == {name: [] for name in programs}, f"rank {rank}"
    for name in programs:
        assert_same_order([collectives[name] for _, _, collectives in results])
    return results[0][1]


def assert_spare_alone(planted: dict[str, int]) -> None:
    """Without what any line waits for there is a race, unless the line is spare."""
    assert any(not line.startswith("_fsdp") for line in planted)  # FSDP2's and this package's
    for line, num_races in planted.items() if torch.__version__ >= "2.13" else ():  # whose lines SPARE names
        is_spare = any(re.sub(r"\S+:\d+ ", "", line).startswith(spare) for spare in SPARE)  # wherever it stands
        assert (num_races == 0) == is_spare, f"{num_races} races without {line}"


def test_no_race_and_every_planted_one_is_found():
    planted = assert_in_order("all", ["accumulation", "unshard_by_hand"], plants=True)
    assert_spare_alone(planted)


def test_copies_are_read_from_host_memory_after_they_were_written_and_before_they_are_sent():
    planted = assert_in_order("all, in host memory, moved codes, element scales", ["accumulation"], plants=True)
    of_reads = {line: num_races for line, num_races in planted.items() if "called from" in line and "_read" in line}
    assert len(of_reads) == 2 and all(of_reads.values()), planted


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS)
def test_no_race_whatever_a_program_does(config):
    planted = assert_in_order(config, list(PROGRAMS), plants=config == "all")
    if planted:
        assert_spare_alone(planted)


def test_another_order_of_collectives_is_seen():
    def on(ranks, name):
        return Collective(str(ranks), ranks, name, ())

    everyone, pair = on((0, 1, 2), "all_reduce"), on((0, 1), "all_gather")
    assert_same_order([[everyone, pair], [everyone, pair], [everyone]])
    for other in ([pair, everyone], [everyone], [everyone, on((0, 1), "broadcast")]):
        with pytest.raises(AssertionError):
            assert_same_order([[everyone, pair], other, [everyone]])
