"""An island that holds NaN, Inf or huge numbers does the others no harm, and comes back with their parameters."""

import contextlib
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_zpp.islands import IslandConfig, apply_islands
from megatron_zpp.islands.outer_state import local_data
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from tests.ranks import run_in_turn, run_ranks

STEPS = 10
BAD = {"nan": torch.nan, "inf": -torch.inf, "huge": 1e30}


def build_model() -> nn.Sequential:
    """Parts of 2 and of 3 islands are whole blocks, so that codes don't depend on the number of islands."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 48, bias=False), nn.Tanh(), nn.Linear(48, 12, bias=False))


def spoil(optimizer: torch.optim.Optimizer, bad: float) -> None:
    """Put a value into the last parameter and into Adam's moments, as a broken chip would."""
    for state in optimizer.state.values():
        local_data(state["exp_avg"]).fill_(bad)
    local_data([*optimizer.state][-1]).flatten()[-1:].fill_(bad)


def train(
    config: IslandConfig, numbers: list[int], size: int, spoiled: int | None = None, bad: float = 0.0
) -> tuple[list[Tensor], str]:
    """Train this rank's island; return the whole parameters, and what was printed.

    numbers: of the islands that are there, of ``size`` ranks each. spoiled: the island whose last rank gets ``bad``
    before each synchronization.
    """
    mesh = init_device_mesh("cpu", (len(numbers), size), mesh_dim_names=("island", "shard"))
    number, shard = numbers[mesh.get_local_rank("island")], mesh.get_local_rank("shard")
    model, zeropp, said = build_model(), None, io.StringIO()
    if size > 1:
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh["shard"])
        zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=1, quantized_gradients=True, loco=LoCoConfig()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    islands = apply_islands(model, optimizer, config, mesh["island"], zeropp)
    with contextlib.redirect_stdout(said):
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(100 * step + number)
            inputs, targets = (torch.randn(4, 12, generator=generator).chunk(size)[shard] for _ in range(2))
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            is_due = step % (config.sync_interval // config.fragments) == 0 or step == STEPS
            if number == spoiled and shard == size - 1 and is_due:
                spoil(optimizer, bad)
            optimizer.step()
        if not config.sync_delay:
            islands.conclude()
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [parameter.detach().clone() for parameter in parameters], said.getvalue()


CASES = {  # settings, the island that is spoiled, with what
    "fp32, the first": (IslandConfig(4), 0, "nan"),
    "fp32, the last": (IslandConfig(4, "sgd"), 2, "huge"),
    "8 bits with LoCo": (IslandConfig(4, bits=8, loco=True, block_size=16), 1, "inf"),
    "in flight": (IslandConfig(4, fragments=2, sync_delay=1), 1, "nan"),
    "two fragments at the last step": (IslandConfig(4, fragments=2), 1, "huge"),
}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_spoiled_island_changes_no_bit_of_the_others(size):
    """They train as if it had been absent: outer momentum and LoCo's errors too, round after round."""
    with_it, without = {}, {}
    for name, (config, spoiled, bad) in CASES.items():
        with_it[name] = partial(train, config, [0, 1, 2], size, spoiled, BAD[bad])
        without[name] = partial(train, config, [i for i in range(3) if i != spoiled], size)
    found, expected = run_in_turn(3 * size, with_it), run_in_turn(2 * size, without)
    for name, (_, spoiled, _) in CASES.items():
        islands = [found[name][i * size : (i + 1) * size] for i in range(3)]
        spoiled_island = islands.pop(spoiled)
        for (mine, _), (theirs, _) in zip([rank for island in islands for rank in island], expected[name], strict=True):
            assert all(map(torch.equal, mine, theirs)), name
        assert all(bool(x.isfinite().all()) and x.abs().max() < 10 for x in spoiled_island[0][0]), name
        said = found[name][0][1]
        assert f"is in the parameters of island {spoiled} after step 4: 2 of 3 islands synchronize" in said
        assert expected[name][0][1] == ""


def begin_with_nan() -> str:
    model = build_model()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
    try:
        apply_islands(model, None, IslandConfig())
    except ValueError as error:
        return str(error)
    return ""


def test_no_island_starts_from_a_first_one_that_is_spoiled():
    for message in run_ranks(2, begin_with_nan):
        assert message.endswith(
            "in the parameters of the first island, with which all islands start: load other weights"
        )
