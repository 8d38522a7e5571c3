"""What calls of ZeroPP's methods leave behind: weights that a program swapped for a while."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.ranks import run_ranks
from tests.zeropp.training_on_ranks import shard

MOVES = ZeroPPConfig(hpz_partition_size=2, weight_moves=True, quantized_gradients=True, loco=LoCoConfig())


class _InterruptedError(Exception):
    pass


def _swapped():
    """The largest errors of weights that passes saw: of swapped ones with and without the context, and of those since.

    The swap follows a step that no pass has used; an exception ends it.
    """
    torch.manual_seed(0)
    model = nn.Linear(128, 96)
    zeropp = shard(model, MOVES, reshard_after_forward=False)  # gathered until somebody says that weights are others
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight  # the sharded one, also while the model has it whole

    def run(trains: bool) -> torch.Tensor:
        """Run a pass over the unit matrix on every rank; return the weights that it sees, [rows, columns]."""
        with torch.set_grad_enabled(trains):
            seen = model(torch.eye(128)) - model(torch.zeros(1, 128))
            if trains:
                seen.square().mean().backward()
        return seen.detach().T

    def whole() -> torch.Tensor:
        return weight.full_tensor().detach().clone()

    def local() -> torch.Tensor:
        return weight.to_local().detach()

    errors = []
    for context in (nullcontext, zeropp.swapped_weights):
        for _ in range(2):
            run(trains=True)
            optimizer.step()
            optimizer.zero_grad()
        own = local().clone()
        with pytest.raises(_InterruptedError), context():
            local().normal_().mul_(100)  # further away than 4 bits can say
            errors.append((run(trains=False) - whole()).abs().max().item())
            local().copy_(own)
            raise _InterruptedError
        errors.append((run(trains=False) - whole()).abs().max().item())
    return errors


def test_passes_see_swapped_weights_and_those_that_are_put_back():
    for without, _, swapped, back in run_ranks(4, _swapped):
        assert max(without, swapped) < 1e-4 and back < 1e-6
