"""Norms, zeros and clipping over ranks; the loss scale grows as Megatron's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_zpp.optim.gradients import (
    LossScaler,
    clip_gradients,
    count_zeros,
    counted_shard,
    params_norm,
    sum_of_squares,
    sum_over_all_ranks,
)
from megatron_zpp.settings.groups import PrecisionSettings
from tests.ranks import run_in_turn

WORLD_SIZE = 4


def clip(parameters, max_norm, copies=()) -> float:
    """Clip, and return the norm before."""
    (squares,) = sum_over_all_ranks([sum_of_squares], parameters, copies)
    return clip_gradients(parameters, max_norm, squares).item()


def zeros(*arguments) -> float:
    return sum_over_all_ranks([count_zeros], *arguments).item()


def test_clipping_scales_to_the_norm_and_reports_the_norm_before() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    unused = nn.Parameter(torch.zeros(1))
    assert zeros([a, b, unused]) == 1
    assert clip([a, b, unused], 10.0) == 5.0
    assert a.grad.tolist() == [3.0, 0.0]  # below the limit: untouched
    assert clip([a, b, unused], 0.0) == 5.0
    assert clip([a, b, unused], 1.0) == 5.0
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.0, 0.8]))


def build_model() -> nn.Module:
    """Sizes that 4 ranks cannot share evenly: 5 rows are 2, 2, 1 and none, 6 rows 2, 2, 2 and none."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 5), nn.Linear(5, 70), nn.Linear(70, 6))


def set_gradients(model: nn.Module) -> None:
    """Set gradients with the same elements, whole or as shards; some are zeros."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        gradient[gradient.abs() < 0.1] = 0.0
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def measure(model):
    """What the trainer asks for, and the gradients after clipping, whole."""
    parameters = list(model.parameters())
    measured = (params_norm(parameters), zeros(parameters), clip(parameters, 1.0))
    grads = [parameter.grad for parameter in parameters]
    return measured, [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def measure_shards():
    model = build_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    set_gradients(model)
    return measure(model), sum(len(counted_shard(parameter)) == 0 for parameter in model.parameters())


def test_ranks_measure_and_clip_as_one_process_to_the_bit(on_ranks):
    model = build_model()
    set_gradients(model)
    measured, clipped = measure(model)
    assert measured[2] > 5.0
    for (of_rank, gradients), _ in on_ranks["real"]:
        assert of_rank == measured
        assert all(mine.equal(its) for mine, its in zip(clipped, gradients, strict=True))
    assert on_ranks["real"][3][1] == 4  # empty shards


def test_a_norm_is_added_up_in_fp64():
    parameter = nn.Parameter(torch.zeros(3, 2**20))
    parameter.grad = torch.full_like(parameter, 0.25)
    parameter.grad[:, 0] = 2.0**12
    expected = torch.tensor(3 * (2.0**24 + (2**20 - 1) / 16), dtype=torch.float64).sqrt().float().item()
    assert clip([parameter], 0.0) == expected


def measure_where_only_rank_0_has_parameters():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([0.0, 2.0])
    parameters = [parameter] if dist.get_rank() == 0 else []
    return zeros(parameters), clip(parameters, 1.0), params_norm(parameters)


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, list]:
    """What each rank measured, by case."""
    return run_in_turn(WORLD_SIZE, {"real": measure_shards, "without": measure_where_only_rank_0_has_parameters})


def test_a_rank_without_parameters_has_the_same_results(on_ranks):
    assert on_ranks["without"] == [(1, 2.0, 5.0)] * WORLD_SIZE


def dynamic(**changes: float) -> LossScaler:
    settings = dict(initial_loss_scale=1024.0, loss_scale_window=3, hysteresis=2) | changes
    return LossScaler(PrecisionSettings(fp16=True, **settings))


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow, ``.`` a clean step."""
    return [(scaler.update(step == "x"), scaler.scale)[1] for step in overflows]


@pytest.mark.parametrize(
    ("scaler", "overflows", "expected"),
    [
        (dynamic(), "......", [1024, 1024, 2048, 2048, 2048, 4096]),  # doubles after a window of clean steps in a row
        (dynamic(), "..x...", [1024, 1024, 1024, 1024, 1024, 2048]),  # an overflow starts the count again
        (dynamic(), "xxx", [1024, 512, 256]),  # the first overflow is tolerated
        (dynamic(), "x..x", [1024, 1024, 1024, 512]),  # clean steps alone do not refill the tolerance
        (dynamic(), "x...x", [1024, 1024, 1024, 2048, 2048]),  # growth does
        (dynamic(initial_loss_scale=2.0, loss_scale_window=1, hysteresis=1), ".xxx", [4, 2, 1, 1]),
        (LossScaler(PrecisionSettings(fp16=True)), ".", [2.0**32]),
        (LossScaler(PrecisionSettings(fp16=True, loss_scale=128.0)), "xx...", [128] * 5),
        (LossScaler(PrecisionSettings(bf16=True)), "xx", [1.0, 1.0]),
    ],
)
def test_the_loss_scale_grows_and_falls_as_megatrons(scaler, overflows, expected):
    assert scales(scaler, overflows) == expected


def test_a_resumed_loss_scale_continues_in_the_middle_of_a_window():
    whole, first, second = dynamic(), dynamic(), dynamic()
    expected = scales(whole, "x..x......")
    start = scales(first, "x..x.")
    second.load_state_dict(first.state_dict())
    assert start + scales(second, ".....") == expected
    fixed = LossScaler(PrecisionSettings(fp16=True, loss_scale=128.0))
    fixed.load_state_dict(first.state_dict())
    assert fixed.scale == 128
