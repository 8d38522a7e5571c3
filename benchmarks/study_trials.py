"""The trainer with what was tried and is not in the package: a Llama that begins with outliers.

python benchmarks/study_trials.py --trial outliers:30 --swiglu ...  # the rest are flags of pretrain_gpt.py
"""

import argparse
import sys
from typing import Any

import torch

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.models.mlp import GatedMLP
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.training import model as model_building


def with_outliers(factor: float, channels: int = 4) -> None:
    """Train a model that begins with outliers, but computes what it would compute without them.

    In each gated MLP some rows of the up projection are ``factor`` times as large, and the columns of the down
    projection that they are multiplied by are as much smaller.
    """

    init_weights = model_building.init_weights

    def init_with_outliers(model: Transformer, seed: int, *arguments: Any) -> None:
        init_weights(model, seed, *arguments)
        with torch.no_grad():
            for mlp in (module for module in model.modules() if isinstance(module, GatedMLP)):
                mlp.linear_fc1_up.weight[:channels] *= factor
                mlp.linear_fc2.weight[:, :channels] /= factor

    model_building.init_weights = init_with_outliers  # type: ignore[assignment]
    main(GPT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--trial", required=True, help="outliers:FACTOR")
    arguments, sys.argv[1:] = parser.parse_known_args()
    name, _, value = arguments.trial.partition(":")
    if name != "outliers" or not value:
        parser.error(f"--trial is outliers:FACTOR, got {arguments.trial}")
    with_outliers(float(value))
