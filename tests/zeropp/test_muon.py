"""Muon on real ranks against torch.optim.Muon in one process, on whole matrices and on each node's rows."""

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from megatron_zpp.zeropp import Muon, ZeroPP, ZeroPPConfig
from megatron_zpp.zeropp.muon import matrix_blocks
from tests.ranks import run_in_turn, run_ranks
from tests.zeropp.training_on_ranks import backward, shard

# Rows that 4 ranks on 2 nodes share evenly and not, with empty shards, an empty node, and as many as columns; an odd
# number of matrices, so that one rank of a node has none of a batch.
SHAPES = [(16, 12), (13, 24), (3, 8), (40, 5), (2, 6), (8, 8), (20, 16)]
RANKS, NODES = 4, 2
ARGUMENTS = dict(lr=0.02, weight_decay=0.1)


class Matrices(nn.Module):
    """Matrices and two other parameters, whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])
        self.others = nn.ParameterList([torch.randn(shape, generator=generator) for shape in [(7,), (9, 5)]])

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        parameters = [*self.matrices, *self.others]
        return sum((p * c).sum() for p, c in zip(parameters, coefficients, strict=True))


def coefficients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in [*SHAPES, (7,), (9, 5)]]


def groups(model: Matrices) -> list[dict]:
    return [dict(params=list(model.matrices)), dict(params=list(model.others), use_muon=False)]


def sent_by_a_step(model: Matrices, zeropp: ZeroPP, optimizer: Muon, step: int) -> tuple[int, int]:
    """Train a step; return what its optimizer sent within and between nodes."""
    backward(zeropp, lambda *_: model(coefficients(step)), step)
    zeropp.traffic.take()
    optimizer.step()
    optimizer.zero_grad()
    traffic = zeropp.traffic.take()
    return traffic.intra_node, traffic.inter_node


def on_ranks(arguments: dict, steps: int, replicas: int = 1) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The parameters after some steps, whole, and what this rank's optimizer sent in each: within, between nodes.

    The second half of the steps is by another optimizer, which has loaded the state of the first.
    """
    model = Matrices()
    sizes = {"replicas": replicas, "shards": RANKS // replicas}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    config = ZeroPPConfig(ranks_per_node=RANKS // NODES)
    zeropp = shard(model, config, mesh=mesh if replicas > 1 else mesh["shards"])
    optimizer = Muon(groups(model), zeropp, **ARGUMENTS, **arguments)
    sent = []
    for step in range(steps):
        if step == steps // 2 > 0:
            state = get_optimizer_state_dict(model, optimizer)
            optimizer = Muon(groups(model), zeropp, **ARGUMENTS, **arguments)
            set_optimizer_state_dict(model, optimizer, state)
        sent.append(sent_by_a_step(model, zeropp, optimizer, step))
    return [p.full_tensor().detach() for p in model.parameters()], sent


def blocks_of(rows: int) -> list[slice]:
    """The rows of each node: FSDP2 gives each rank ceil(rows / W), while there are any."""
    per_node = math.ceil(rows / RANKS) * (RANKS // NODES)
    stops = [0, *(min(rows, per_node * (node + 1)) for node in range(NODES))]
    return [slice(start, stop) for start, stop in pairwise(stops) if stop > start]


def expected(whole_at: list[bool], arguments: dict) -> list[Tensor]:
    """By torch.optim.Muon and AdamW in one process: whole matrices at some steps, node blocks at the others.

    Momentum is the same in both, so that optimizers of blocks and of matrices can go over the same parameters: the one
    whose turn it is not sees a learning rate of 0.
    """
    model = Matrices()
    torch_arguments = {**ARGUMENTS, **arguments}
    blocks = [nn.Parameter(m.detach()[rows]) for m in model.matrices for rows in blocks_of(len(m))]  # views
    by_whole = torch.optim.Muon(model.matrices, **torch_arguments)
    by_blocks = torch.optim.Muon(blocks, **torch_arguments)
    adamw = torch.optim.AdamW(model.others, **ARGUMENTS)
    for step, whole in enumerate(whole_at):
        for parameter, gradient in zip(model.parameters(), coefficients(step), strict=True):
            parameter.grad = gradient
        of_blocks = [c[rows] for c in coefficients(step)[: len(SHAPES)] for rows in blocks_of(len(c))]
        for block, gradient in zip(blocks, of_blocks, strict=True):
            block.grad = gradient
        by_whole.param_groups[0]["lr"] = ARGUMENTS["lr"] if whole else 0.0
        by_blocks.param_groups[0]["lr"] = 0.0 if whole else ARGUMENTS["lr"]
        for optimizer in (by_whole, by_blocks, adamw):
            optimizer.step()
    return [p.detach() for p in model.parameters()]


CASES = {
    "whole matrices": dict(period=1),
    "node blocks": dict(period=None),
    "every third whole": dict(period=3),
    "plain momentum": dict(period=1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3),
    "stale rows": dict(period=3, stale_rows=True),
    "stale rows of 4 bits": dict(period=3, stale_rows=True, momentum_bits=4, momentum_block_size=32),
    "4 bits": dict(period=2, momentum_bits=4, momentum_block_size=32),
}


def _on_ranks_in_turn(cases: dict[str, dict]) -> dict:
    trained = {name: on_ranks(arguments, steps=4) for name, arguments in cases.items()}
    with patch.object(matrix_blocks, "ELEMENTS_AT_ONCE", 1):
        trained["in small batches"] = on_ranks(dict(period=3), steps=4)
    trained["replicas"] = on_ranks(dict(period=3), steps=4, replicas=2)
    trained["one step in 4 bits"] = on_ranks(cases["4 bits"], steps=1)
    return trained


@pytest.fixture(scope="module")
def trained() -> dict:
    """By case, what each rank trained and sent."""
    ranks = run_ranks(RANKS, _on_ranks_in_turn, CASES)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def sent_by_all(ranks: list) -> list[tuple[int, int]]:
    """Bytes that the optimizers of all ranks sent in each step: within and between nodes."""
    return [tuple(map(sum, zip(*of_step, strict=True))) for of_step in zip(*(sent for _, sent in ranks), strict=True)]


@pytest.mark.parametrize(
    "name, whole_at",
    [
        ("whole matrices", [True] * 4),
        ("node blocks", [False] * 4),
        ("every third whole", [True, False, False, True]),
        ("in small batches", [True, False, False, True]),
        ("replicas", [True] * 4),  # each has a node to itself, whose block is the matrix
        ("plain momentum", [True] * 4),
    ],
)
def test_equals_torch_in_one_process(trained, name: str, whole_at: list[bool]) -> None:
    oracle = expected(whole_at, {key: value for key, value in CASES.get(name, {}).items() if key != "period"})
    for parameters, _ in trained[name]:
        for mine, theirs in zip(parameters, oracle, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_stale_rows_are_those_of_the_last_whole_step(trained) -> None:
    """By hand: each node orthogonalizes its rows of now among the rows that others had at the last whole step."""
    matrices, momenta = [m.detach() for m in Matrices().matrices], [torch.zeros(shape) for shape in SHAPES]
    old = [torch.zeros(shape) for shape in SHAPES]
    for step in range(4):
        for i, gradient in enumerate(coefficients(step)[: len(SHAPES)]):
            momenta[i] = 0.95 * momenta[i] + 0.05 * gradient
            update = 0.95 * momenta[i] + 0.05 * gradient
            if step % 3 == 0:
                old[i] = update
            moved = matrices[i].clone()
            for rows in blocks_of(len(update)):
                mixed = old[i].clone()
                mixed[rows] = update[rows]
                by_torch = nn.Parameter(matrices[i].clone())
                by_torch.grad = mixed
                torch.optim.Muon([by_torch], **ARGUMENTS, momentum=0.0, nesterov=False).step()
                moved[rows] = by_torch.detach()[rows]
            matrices[i] = moved
    for parameters, _ in trained["stale rows"]:
        for mine, by_hand in zip(parameters, matrices, strict=False):
            torch.testing.assert_close(mine, by_hand, rtol=0, atol=1e-5)
        assert not any(
            mine.equal(other) for mine, other in zip(parameters[:2], trained["every third whole"][0][0], strict=False)
        )


def _padded_shards(tensor: Tensor) -> list[Tensor]:
    """Each rank's rows, flat, with zeros for those that are missing."""
    rows = math.ceil(len(tensor) / RANKS)
    padded = torch.cat([tensor, tensor.new_zeros(rows * RANKS - len(tensor), tensor.shape[1])])
    return [padded[rank * rows : (rank + 1) * rows].reshape(-1) for rank in range(RANKS)]


def _in_four_bits(shard: Tensor) -> Tensor:
    """What arrives of a rank's rows: 15 levels of a block's largest, or bf16 where a scale would not pay."""
    if len(shard) < 32:
        return shard.bfloat16().float()
    steps = [block.abs().amax() / 7 for block in shard.split(32)]
    return torch.cat([(block / step).round() * step for block, step in zip(shard.split(32), steps, strict=True)])


def test_whole_matrices_of_four_bits_are_those_of_the_quantized_momentum(trained) -> None:
    model = Matrices()
    parameters, _ = trained["one step in 4 bits"][0]
    for mine, matrix, gradient in zip(parameters, model.matrices, coefficients(0), strict=False):
        update = gradient.lerp(gradient * (1 - 0.95), 0.95)  # Nesterov's, of the first step
        arrived = torch.cat([_in_four_bits(shard) for shard in _padded_shards(update)])
        matrix.grad = arrived[: matrix.numel()].view(matrix.shape)
        torch.optim.Muon([matrix], **ARGUMENTS, momentum=0.0, nesterov=False).step()
        torch.testing.assert_close(mine, matrix.detach(), rtol=0, atol=1e-6)


def test_sends_what_the_formula_says(trained) -> None:
    """Within nodes rows go to one rank and back; between nodes each rank's rows go to its N - 1 peers."""
    per_node = RANKS // NODES
    rows = [len(_padded_shards(torch.empty(shape))[0]) for shape in SHAPES]  # elements of a rank's, padded
    to_owners_and_back = 2 * (per_node - 1) * NODES * sum(rows) * 2
    between = RANKS * (NODES - 1) * sum(rows) * 2
    expected = {"node blocks": [(to_owners_and_back, 0)] * 4}
    whole = (to_owners_and_back + (NODES - 1) * to_owners_and_back // 2, between)
    expected["whole matrices"] = [whole] * 4
    expected["every third whole"] = [whole, (to_owners_and_back, 0), (to_owners_and_back, 0), whole]
    for name, of_steps in expected.items():
        for (within, crossing), (expected_within, expected_crossing) in zip(
            sent_by_all(trained[name]), of_steps, strict=True
        ):
            assert within == expected_within, name
            # A wire ends at a multiple of 16 bytes, for each batch.
            assert expected_crossing <= crossing < expected_crossing + 16 * RANKS * len(SHAPES) * (crossing > 0) + 1
    quantized = [crossing for _, crossing in sent_by_all(trained["4 bits"])]
    assert quantized[1] == quantized[3] == 0
    assert 0 < quantized[0] < 0.5 * between  # small matrices travel in bf16


def _momenta_of_scaled_gradients() -> list[list[Tensor]]:
    found = []
    for scale in (1.0, 1024.0):
        model = Matrices()
        zeropp = shard(model, ZeroPPConfig())
        optimizer = Muon(groups(model), zeropp, **ARGUMENTS)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(coefficients(0))).backward()
        scaler.step(optimizer)
        found.append([optimizer.state[matrix]["momentum_buffer"].to_local() for matrix in model.matrices])
    return found


def _refusals() -> list[str]:
    """The messages for wrong arguments, and for a parameter that is no matrix."""
    model, messages = Matrices(), []
    zeropp = shard(model, ZeroPPConfig())
    for parameters, arguments in [(groups(model), dict([pair])) for pair in REFUSED] + [(model.parameters(), {})]:
        with pytest.raises(ValueError) as error:
            Muon(parameters, zeropp, **arguments)
        messages.append(str(error.value))
    return messages


def test_a_gradient_scaler_unscales_the_matrices_too(alone) -> None:
    (found,) = alone["scaled"]
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def _refused_on_a_rank(columns: bool) -> str:
    model = nn.Linear(8, 8, bias=False)
    zeropp = shard(model, ZeroPPConfig(), shard_placement_fn=(lambda _: Shard(1)) if columns else None)
    other = nn.Parameter(torch.zeros(2, 2))
    other.grad = torch.zeros(2, 2)
    with pytest.raises(ValueError) as error:
        Muon([model.weight] if columns else [other], zeropp).step()
    return str(error.value)


def test_refuses_other_shards_and_other_models() -> None:
    refusals = {"rows are sharded": True, "not of the model": False}
    functions = {message: partial(_refused_on_a_rank, columns) for message, columns in refusals.items()}
    for message, errors in run_in_turn(2, functions).items():
        assert all(message in error for error in errors)


REFUSED = {  # keyword arguments, as pairs, and the message
    ("period", 0): "period must be at least 1, or None",
    ("adjust_lr_fn", "none"): "adjust_lr_fn 'none' is not one of spectral",
    ("momentum", 1.0): "momentum must be",
    ("ns_steps", 0): "ns_steps must be",
    ("stale_rows", True): "stale_rows needs a period above 1",
    ("momentum_bits", 7): "momentum_bits must be one of",
    ("momentum_block_size", 12): "momentum_block_size must be",
}


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one rank found."""
    return run_in_turn(1, {"scaled": _momenta_of_scaled_gradients, "refused": _refusals})


def test_refuses_arguments_that_cannot_be_and_what_is_no_matrix(alone) -> None:
    expected = [*REFUSED.values(), "Muon is for matrices, not for a parameter of shape (7,)"]
    for message, start in zip(alone["refused"][0], expected, strict=True):
        assert start in message


def test_refuses_offloaded_matrices() -> None:
    with pytest.raises(ValueError, match="on the device that computes, cuda"):
        Muon(Matrices().matrices, SimpleNamespace(device=torch.device("cuda")))
