"""What travels between islands in low bits, against block quantization written out: values, errors and bytes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.islands import IslandConfig, apply_islands
from megatron_zpp.islands.timetable import Timetable, divide
from tests.ranks import run_ranks

SHAPES = [(7, 31), (5,), (3, 50)]  # the vector travels unquantized; no part of an island is whole blocks
BLOCK = 16
ROUNDS = 4


def steps_of(island: int, round: int) -> list[Tensor]:
    """What an island's optimizer subtracts from its parameters."""
    generator = torch.Generator().manual_seed(10 * round + island)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rounded(part: Tensor, bits: int | None) -> Tensor:
    """A part [l] of a matrix as it arrives: absmax codes in blocks, the last one padded."""
    if bits is None:
        return part.bfloat16().float()
    blocks = torch.cat([part, part.new_zeros(-part.numel() % BLOCK)]).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((blocks / scales).nan_to_num().round() * scales).flatten()[: part.numel()]


def agreements(num_islands: int, bits: int | None, beta: float | None) -> list[list[Tensor]]:
    """The agreed parameters after each round, begun at zero, without momentum and with a learning rate of 1."""
    rows = [math.ceil(math.prod(shape) / num_islands) for shape in SHAPES]
    shape_of_parts = [(num_islands, row) for row in rows]
    errors = [[torch.zeros(shape) for shape in shape_of_parts] for _ in range(num_islands)]
    errors_of_means = [torch.zeros(shape) for shape in shape_of_parts]
    agreed, found = [torch.zeros(shape) for shape in SHAPES], []

    def sent(part: Tensor, error: Tensor, is_matrix: bool) -> Tensor:
        """As it arrives; the error moves."""
        if not is_matrix and bits is not None:
            return part  # in fp32
        if beta is None:
            return rounded(part, bits)
        arrived = rounded(part + error, bits)
        error.copy_(beta * error + (1 - beta) * (part + error - arrived))
        return arrived

    for round in range(ROUNDS):
        for i, shape in enumerate(SHAPES):
            sums = torch.zeros(shape_of_parts[i])
            for island in range(num_islands):
                way = steps_of(island, round)[i].flatten() / num_islands
                parts = torch.cat([way, way.new_zeros(num_islands * rows[i] - way.numel())]).view(num_islands, -1)
                for to in range(num_islands):
                    sums[to] += sent(parts[to], errors[island][i][to], len(shape) > 1)
            means = [sent(sums[of], errors_of_means[i][of], len(shape) > 1) for of in range(num_islands)]
            agreed[i] = agreed[i] - torch.cat(means)[: math.prod(shape)].view(shape)
        found.append([value.clone() for value in agreed])
    return found


def exchange(config: IslandConfig) -> tuple[list[list[Tensor]], list[int]]:
    """The agreed parameters after each round, and the bytes that this rank, an island, has sent for it."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    islands = apply_islands(model, optimizer, config)
    found, sent = [], []
    for round in range(ROUNDS):
        for parameter, step in zip(model, steps_of(dist.get_rank(), round), strict=True):
            parameter.grad = step
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model])
        sent.append(islands.traffic.take().inter_island)
    return found, sent


def config_of(**wire: object) -> IslandConfig:
    return IslandConfig(1, "sgd", outer_lr=1.0, outer_momentum=0.0, block_size=BLOCK, **wire)


@pytest.mark.parametrize("num_islands", [2, 3])
def test_it_arrives_as_blocks_say(num_islands):
    wires = {
        (8, None): config_of(bits=8),
        (4, None): config_of(bits=4),
        (4, 0.8): config_of(bits=4, loco=True),
        (4, 0.0): config_of(bits=4, loco=True, loco_beta=0.0),
        (None, None): config_of(dtype="bf16"),
        (None, 0.8): config_of(dtype="bf16", loco=True),
    }
    of_ranks = run_ranks(num_islands, _each, list(wires.values()))
    for number, (bits, beta) in enumerate(wires):
        expected = agreements(num_islands, bits, beta)
        first = of_ranks[0][number][0]
        for found, sent in (of_rank[number] for of_rank in of_ranks):
            for mine, its, of_first in zip(found, expected, first, strict=True):
                for x, y, z in zip(mine, its, of_first, strict=True):
                    assert torch.equal(x, z)  # on all islands alike
                    # LoCo keeps its errors in few bits, and now and then that makes another code.
                    is_close = torch.isclose(x, y, rtol=1e-5, atol=1e-5 if beta is None else 0.02)
                    assert is_close.float().mean() >= (1.0 if beta is None else 0.98)
            parts = [math.ceil(math.prod(shape) / num_islands) for shape in SHAPES]
            assert sent == [2 * (num_islands - 1) * bytes_of(parts, bits)] * ROUNDS


def bytes_of(parts: list[int], bits: int | None) -> int:
    """Of a piece: codes and scales of the matrices, then the vector's values; each begins at a multiple of 16."""

    def aligned(nbytes: int) -> int:
        return -(-nbytes // 16) * 16

    if bits is None:
        return aligned(2 * sum(parts))  # side by side
    blocks = [math.ceil(parts[i] / BLOCK) for i in (0, 2)]
    return sum(aligned(n * BLOCK * bits // 8) + aligned(4 * n) for n in blocks) + aligned(4 * parts[1])


def _each(configs: list[IslandConfig]) -> list[tuple[list[list[Tensor]], list[int]]]:
    return [exchange(config) for config in configs]


def test_errors_return_what_two_bits_lose():
    """What arrived in all comes closer to what was to be sent, where it would drift away without."""
    exact, lossy, corrected = run_ranks(
        2, _each, [config_of(), config_of(bits=2), config_of(bits=2, loco=True, loco_beta=0.0)]
    )[0]
    error = {
        name: sum((x - y).square().sum() for x, y in zip(found[0][-1], exact[0][-1], strict=True)).sqrt()
        for name, found in {"without": lossy, "with": corrected}.items()
    }
    assert error["with"] < 0.6 * error["without"]


def _refuse() -> list[str]:
    messages = []
    for model, group in (
        (nn.Linear(3, dist.get_rank() + 1), None),
        (nn.Linear(3, 2), dist.new_subgroups(1)[0]),
        (nn.Linear(3, 2).requires_grad_(False), None),
        (nn.Linear(3, 2, dtype=torch.complex64), None),
    ):
        try:
            apply_islands(model, torch.optim.SGD(nn.Linear(1, 1).parameters()), IslandConfig(), group)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_agree_is_refused():
    for messages in run_ranks(2, _refuse):
        assert [message.split(":")[0] for message in messages] == [
            "ranks of the same place in their islands hold other parameters, or other parts of them",
            "one island has no other to agree with",
            "the model has no trainable parameter, so there is nothing that islands could agree on",
            "the parameter weight is complex, and islands agree on real numbers",
        ]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bits": 5}, "bits must be one of"),
        ({"block_size": 12}, "multiple of 8"),
        ({"scaling": "mean"}, "set bits"),
        ({"bits": 8, "scaling": "mean"}, "use absmax"),
        ({"loco": True}, "fp32 loses nothing"),
        ({"sync_interval": 2, "fragments": 3}, "fragments 3"),
        ({"sync_interval": 2, "sync_delay": 2}, "below sync_interval"),
        ({"outer_optimizer": "adam"}, "outer_optimizer must be one of"),
        ({"merge_alpha": 1.0}, "merge_alpha must be below 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        IslandConfig(**wrong)


def test_layers_go_round():
    names = ["embed.weight", "layers.0.w", "layers.0.x.1.w", "layers.1.w", "layers.2.w", "h2.3.w", "norm.weight"]
    divided = divide(dict.fromkeys(names), 2)
    assert [[*part] for part in divided] == [
        ["embed.weight", "layers.0.w", "layers.0.x.1.w", "layers.2.w", "norm.weight"],
        ["layers.1.w", "h2.3.w"],
    ]
    with pytest.raises(ValueError, match="more than the 4 layers"):
        divide(dict.fromkeys(names), 5)


class _Counted:
    """A fragment whose parameters are the number of the step that they are of."""

    def __init__(self) -> None:
        self.own = self.agreed = 0
        self.sent: int | None = None
        self.has_turned = self.on_mean = False

    @property
    def is_in_flight(self) -> bool:
        return self.sent is not None

    def start(self) -> None:
        self.sent, self.has_turned = self.own, False

    def turn(self) -> None:
        assert self.is_in_flight and not self.has_turned
        self.has_turned = True

    def finish(self, on_mean: bool = False) -> None:
        assert self.sent is not None and self.has_turned
        self.agreed, self.sent, self.on_mean = self.sent, None, on_mean


@pytest.mark.parametrize("interval, fragments, delay", [(1, 1, 0), (3, 1, 2), (4, 2, 0), (5, 2, 3), (6, 4, 5)])
def test_all_that_was_trained_is_agreed_on_whenever_training_ends(interval, fragments, delay):
    timetable, was_left_out = Timetable(interval, fragments, delay), False
    for end in range(1, 3 * interval + 1):
        travelling = [_Counted() for _ in range(fragments)]
        for step in range(1, end + 1):
            for fragment in travelling:
                fragment.own = step
            timetable.advance(travelling, step)
        left_out = any(fragment.agreed < end for fragment in travelling)
        assert timetable.conclude(travelling, end) == left_out
        for number, fragment in enumerate(travelling):
            assert fragment.agreed == end and not fragment.is_in_flight
            assert fragment.on_mean == ((end - number * interval // fragments) % interval > 0)
        was_left_out = was_left_out or left_out
    assert was_left_out == (interval > 1)
