"""The trainer with what was tried and is not in the package: a Llama that begins with outliers.

python benchmarks/study_trials.py --trial outliers:30 --swiglu ...  # the rest are flags of pretrain_gpt.py
"""

import argparse
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.models.mlp import GatedMLP
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.training import model as model_building


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--trial", required=True, help="outliers:FACTOR")
    arguments, sys.argv[1:] = parser.parse_known_args()
    name, _, value = arguments.trial.partition(":")
    if name != "outliers" or not value:
        parser.error(f"--trial is outliers:FACTOR, got {arguments.trial}")
    train_with_outliers(float(value))
