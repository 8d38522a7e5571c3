"""What a rank does besides computing does not grow with the ranks."""

from __future__ import annotations

import pytest
import scaling


def test_growth_is_the_simplest_that_fits():
    for name, values in (("constant", [7, 7, 7, 7]), ("log W", [5, 6, 7, 8]), ("W", [10, 14, 22, 38])):
        kind, function = scaling.fit((4, 8, 16, 32), values)
        assert kind == name and round(function(64)) == {"constant": 7, "log W": 9, "W": 70}[name]


@pytest.mark.long
def test_steps_logs_and_saves_do_as_much_with_twice_the_ranks():
    few, many = scaling.count(4), scaling.count(8)
    for phase in ("load", "step", "log", "evaluation", "save", "exit", "loop"):
        for what in ("collectives", "requests to the store", "barriers", "groups"):
            assert {rank[phase].get(what, 0) for rank in many} == {few[0][phase].get(what, 0)}, (phase, what)
    for phase in ("load", "step", "log", "evaluation", "exit", "loop"):
        assert not any(rank[phase].get("bytes of objects") for rank in many), phase
    of_others = [max(rank["save"]["bytes of objects"] for rank in ranks[1:]) for ranks in (few, many)]
    assert of_others[1] < 1.2 * of_others[0]
    assert sum(rank["log"]["lines"] for rank in many) == 1
