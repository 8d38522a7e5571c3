"""The trainer with what was tried and is not in the package: a Llama that begins with outliers, and DDP with PowerSGD.

python benchmarks/study_trials.py --trial outliers:30 --swiglu ...  # the rest are flags of pretrain_gpt.py
python benchmarks/study_trials.py --trial powersgd:2 ...  # one rank, which reads the micro-batches of all ranks
"""

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.models.mlp import GatedMLP
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.training import model as model_building
from megatron_zpp.training import step


@torch.no_grad()
def add_outliers(model: nn.Module, factor: float, channels: int = 4) -> None:
    """Give a model outliers, but let it compute what it would compute without them.

    In each gated MLP some rows of the up projection are ``factor`` times as large, and the columns of the down
    projection that they are multiplied by are as much smaller.
    """
    for mlp in (module for module in model.modules() if isinstance(module, GatedMLP)):
        up, down = mlp.linear_fc1_up.weight, mlp.linear_fc2.weight
        rows, columns = torch.ones(up.shape), torch.ones(down.shape)
        rows[:channels] = columns[:, :channels] = factor
        if isinstance(up, DTensor) and isinstance(down, DTensor):  # a slice of its shards would be a copy
            rows = distribute_tensor(rows, up.device_mesh, up.placements)
            columns = distribute_tensor(columns, down.device_mesh, down.placements)
        up *= rows
        down /= columns


def train_with_outliers(factor: float) -> None:
    """Train a model that begins with outliers."""
    init_weights = model_building.init_weights

    def init_with_outliers(model: Transformer, seed: int, *arguments: Any) -> None:
        init_weights(model, seed, *arguments)
        add_outliers(model, factor)

    model_building.init_weights = init_with_outliers  # type: ignore[assignment]
    main(GPT)


def compress(gradients: list[Tensor], state: PowerSGDState) -> None:
    """Turn the ranks' mean gradients into what PyTorch's PowerSGD makes of all ranks' gradients.

    Every sum is linear in the ranks' gradients and errors, and orthogonalization ignores a factor, because its epsilon
    is 0. So the means suffice. All gradients are in one bucket, as in the race.
    """
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    pieces = [p.view_as(g) for p, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
    bucket = SimpleNamespace(buffer=lambda: flat, gradients=lambda: pieces, index=lambda: 0, is_last=lambda: True)
    powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece)


def train_with_power_sgd(exact_steps: int) -> None:
    """Train as DDP with PowerSGD of rank 4 after ``exact_steps`` would."""
    accumulate_gradients = step.accumulate_gradients
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=exact_steps)

    def accumulate_and_compress(trainer: Any, *arguments: Any) -> Any:
        assert dist.get_world_size() == 1  # or these would be shards
        result = accumulate_gradients(trainer, *arguments)
        compress([p.grad.to_local() for p in trainer.model.parameters()], state)
        return result

    step.accumulate_gradients = accumulate_and_compress  # type: ignore[assignment]
    main(GPT)


TRIALS = {
    "outliers": lambda factor: train_with_outliers(float(factor)),
    "powersgd": lambda n: train_with_power_sgd(int(n)),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--trial", required=True, help="outliers:FACTOR or powersgd:EXACT_STEPS")
    arguments, sys.argv[1:] = parser.parse_known_args()
    name, _, value = arguments.trial.partition(":")
    if name not in TRIALS or not value:
        parser.error(f"--trial is outliers:FACTOR or powersgd:EXACT_STEPS, got {arguments.trial}")
    TRIALS[name](value)
