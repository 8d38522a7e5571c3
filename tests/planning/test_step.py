"""The simulated step, against schedules that were worked out by hand and by a search over what waits for what."""

import dataclasses
import itertools

import pytest

from megatron_zpp.planning.step import BETWEEN, WITHIN, StepShape, Transfer, UnitTimes, _Step, simulate

NOTHING = Transfer(WITHIN, 0.0)
ROOT = UnitTimes(NOTHING, stays_gathered=True)


def layer(gather: float, reduce: float, **more: object) -> UnitTimes:
    times = dict(forward=2.0, backward=4.0) | more
    return UnitTimes(Transfer(BETWEEN, gather), stays_gathered=False, reduce=Transfer(BETWEEN, reduce), **times)


def step(unit: UnitTimes, layers: int = 3, **more: object) -> StepShape:
    shape = StepShape((ROOT, *[unit] * layers), 1, 3, head_forward=0.0, head_backward=0.0, optimizer=0.0)
    return dataclasses.replace(shape, **more)


@pytest.mark.parametrize(
    ("gather", "overlaps", "seconds"),
    [
        # Only the first gather of each pass and the last reduction are exposed.
        (1.0, True, 3 * (2 + 4) + 3 * 1),
        (1.0, False, 3 * (2 + 4) + 3 * (2 + 1)),
        # Forward: 30 of gathers, and the last layer's arithmetic, 2. Backward: gathers of layers 3 and 2 to 52, the
        # reduction of layer 3 to 53, the gather of layer 1 to 63, the reduction of layer 2 to 64; layer 1 computes to
        # 67, its reduction ends at 68.
        (10.0, True, 68.0),
    ],
)
def test_gathers_and_reductions_hide_behind_arithmetic(gather, overlaps, seconds):
    found = simulate(step(layer(gather, reduce=1.0), overlaps=overlaps))
    assert (found.seconds, found.compute) == (seconds, 18.0)
    assert (found.exposed_between, found.exposed_within) == (seconds - 18.0, 0.0)


def test_a_gather_waits_for_the_copy_of_the_unit_before_the_last():
    """FSDP2 holds two gathered buffers: when computing takes longer than gathering, the link must fall idle."""
    one = _Step(step(layer(gather=1.0, reduce=0.0, forward=10.0, backward=0.0), layers=4), 1)
    one.forward(is_first=True)
    # The fourth gather waits until the second layer was copied out, when the first one has computed: 1 + 10.
    assert one.last[BETWEEN].start == 11.0


def test_weights_and_gradients_cross_nodes_beside_arithmetic_once_per_step():
    between = dict(weights_between=Transfer(BETWEEN, 1.0), gradients_between=Transfer(BETWEEN, 3.0))
    unit = UnitTimes(NOTHING, stays_gathered=False, reduce=NOTHING, **between, forward=2.0, backward=4.0)
    for micro_batches in (1, 3):
        found = simulate(step(unit, micro_batches=micro_batches))
        # The first unit's weights, and the last one's gradients.
        assert found.exposed_between == 1.0 + 3.0
        assert found.seconds == micro_batches * 18.0 + 4.0
    # So it is without overlap of the others, too.
    assert simulate(step(unit, overlaps=False)).exposed_between == 4.0
    # Three units' gradients take 3 x 9: the link is busy from the first unit's on, at 1 + 6 + 4, to the end.
    slow = dataclasses.replace(unit, gradients_between=Transfer(BETWEEN, 9.0))
    assert simulate(step(slow)).seconds == 11.0 + 27.0


def test_stages_of_zero():
    # 3: two gathers and a reduction each time; 2: gathers once per step; 1: and one reduction.
    for zero_stage, collectives in {3: 3 * 3 * (2 + 1), 2: 3 + 3 * 3, 1: 3 + 3}.items():
        unit = layer(gather=1.0, reduce=1.0, forward=0.5, backward=0.5)
        unit = dataclasses.replace(unit, stays_gathered=zero_stage < 3)
        shape = step(unit, micro_batches=3, overlaps=False, zero_stage=zero_stage)
        assert simulate(shape).seconds == 3 * 3 * 1.0 + collectives


def test_replicas_add_up_once_per_step():
    unit = dataclasses.replace(layer(1.0, 1.0), all_reduce=Transfer(BETWEEN, 5.0))
    plain, with_replicas = (simulate(step(u, micro_batches=4, overlaps=False)) for u in (layer(1.0, 1.0), unit))
    assert with_replicas.seconds == plain.seconds + 3 * 5.0


def many_shapes():
    for gather, reduce, between, kernels, overlaps in itertools.product(
        (0.1, 3.0), (0.2, 5.0), (None, 0.3, 4.0), (0.0, 0.7), (True, False)
    ):
        unit = UnitTimes(
            Transfer(WITHIN, gather, kernels, kernels),
            stays_gathered=False,
            reduce=Transfer(WITHIN if between else BETWEEN, reduce, kernels, 0.5 * kernels),
            weights_between=Transfer(BETWEEN, between, kernels, kernels) if between else None,
            gradients_between=Transfer(BETWEEN, 2 * between, kernels, kernels) if between else None,
            forward=1.0,
            backward=2.5,
            in_forward=(Transfer(WITHIN, 0.4),),
        )
        yield step(unit, layers=4, overlaps=overlaps, optimizer=0.25, head_forward=0.5, head_backward=1.0)


@pytest.mark.parametrize("shape", [*many_shapes()])
def test_parts_add_up_and_many_micro_batches_continue_the_steady_state(shape):
    one = _Step(shape, 11)
    found = one.run()
    assert found.seconds - found.optimizer == pytest.approx(one.last["compute"].end)
    assert simulate(dataclasses.replace(shape, micro_batches=11)).seconds == pytest.approx(found.seconds, rel=0.01)


def test_a_pipeline_idles_for_some_micro_batches():
    shape = step(layer(0.0, 0.0), micro_batches=6, optimizer=1.0)
    assert simulate(dataclasses.replace(shape, idle_micro_batches=3)).seconds == pytest.approx((6 + 3) * 18 + 1)
