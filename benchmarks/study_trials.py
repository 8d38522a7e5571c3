"""The trainer with limits on gradients that were tried and are not in the package; the study runs it.

python benchmarks/study_trials.py --trial limited-elements ...  # the rest are flags of pretrain_gpt.py
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.zeropp.wire.quantization import STEPS

TRIALS = {"limited-elements": False, "limited-elements-with-rest": True}


def with_limited_elements(keeps_rest: bool) -> None:
    """Train with gradients that are not rounded, but limited where 2 bits with scales of elements would limit them.

    Divided by sqrt(v), an element is at most 1.5 steps, of 1.25 times the mean of its block of 128. v <- 0.98 v +
    0.02 limited^2. What is cut off comes in a later step, or never.
    """
    state: dict[Tensor, tuple[int, Tensor, Tensor]] = {}  # steps so far, v and what was cut off, both like the gradient

    def limited(wanted: Tensor, v: Tensor) -> Tensor:
        scales = v.clamp(min=1e-3 * v.mean() + 1e-30).sqrt()
        sizes = (wanted / scales).abs().flatten()
        blocks = F.pad(sizes, (0, -len(sizes) % 128)).unflatten(0, (-1, 128))
        reach = 1.5 * STEPS[2][0] * blocks.mean(dim=1).repeat_interleave(128)[: len(sizes)].view_as(scales) * scales
        return torch.clamp(wanted, -reach, reach)

    def limit(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                steps, v, rest = state.get(parameter, (0, torch.zeros_like(gradient), torch.zeros_like(gradient)))
                wanted = gradient + rest
                gradient.copy_(limited(wanted, v) if steps else wanted)
                v = torch.lerp(v, gradient.square(), max(0.02, 1 / (steps + 1)))
                state[parameter] = steps + 1, v, wanted - gradient if keeps_rest else rest

    handle = register_optimizer_step_pre_hook(limit)
    main(GPT)
    handle.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--trial", choices=TRIALS, required=True)
    arguments, sys.argv[1:] = parser.parse_known_args()
    with_limited_elements(TRIALS[arguments.trial])
