"""The trainer with what was tried and is not in the package: limits, masks and codes of gradients, outliers.

python benchmarks/study_trials.py --trial limited-elements ...  # the rest are flags of pretrain_gpt.py
python benchmarks/study_trials.py --trial first-moments:0.1:80 ...
python benchmarks/study_trials.py --trial ternary:1.2 --zeropp-gradient-bits 2 ...
python benchmarks/study_trials.py --trial ternary:1.2:0.8-0.95 --zeropp-gradient-bits 2 --zeropp-loco ...
python benchmarks/study_trials.py --trial outliers:30 --swiglu ...
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.models.mlp import GatedMLP
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.training import model as model_building
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire import quantization
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.quantization import STEPS, Code

LIMITS = ("limited-elements", "limited-elements-with-rest", "largest-fifth-with-rest")
TRIALS = ("first-moments:SHARE:DENSE_STEPS", "ternary:THRESHOLDS[:BETAS]", "outliers:FACTOR")


# (gradient, what is to be sent: it and what was held back, statistic, steps so far) -> what is sent, new statistic
Change = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def with_changed_gradients(change: Change, keeps_rest: bool = True) -> None:
    """Train with what ``change`` makes of each parameter's gradient; what it holds back comes later, or never."""
    state: dict[Tensor, tuple[int, Tensor, Tensor]] = {}  # steps so far, statistic and rest, both like the gradient

    def change_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                zeros = torch.zeros_like(gradient)
                steps, statistic, rest = state.get(parameter, (0, zeros, zeros))
                wanted = gradient + rest
                sent, statistic = change(gradient, wanted, statistic, steps)
                state[parameter] = steps + 1, statistic, wanted - sent if keeps_rest else rest
                gradient.copy_(sent)

    handle = register_optimizer_step_pre_hook(change_all)
    main(GPT)
    handle.remove()


def with_limited_elements(name: str) -> None:
    """Train with gradients that are not rounded, but limited where few bits with scales of elements would limit them.

    Divided by sqrt(v), at 2 bits an element is at most 1.5 steps, of 1.25 times the mean of its block of 128; at 1 bit
    all but the largest fifth of a block are zero. v <- 0.98 v + 0.02 limited^2. What is cut off comes in a later step,
    or never.
    """
    keeps_fifth = name.startswith("largest-fifth")

    def limited(wanted: Tensor, v: Tensor) -> Tensor:
        scales = v.clamp(min=1e-3 * v.mean() + 1e-30).sqrt()
        sizes = (wanted / scales).abs().flatten()
        blocks = F.pad(sizes, (0, -len(sizes) % 128)).unflatten(0, (-1, 128))
        if keeps_fifth:
            least = blocks.topk(26, dim=1).values[:, -1:]
            return wanted * (blocks >= least).flatten()[: len(sizes)].view_as(wanted)
        reach = 1.5 * STEPS[2][0] * blocks.mean(dim=1).repeat_interleave(128)[: len(sizes)].view_as(scales) * scales
        return torch.clamp(wanted, -reach, reach)

    def limit(gradient: Tensor, wanted: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        sent = limited(wanted, v) if steps else wanted
        return sent, torch.lerp(v, sent.square(), max(0.02, 1 / (steps + 1)))

    with_changed_gradients(limit, keeps_rest=name.endswith("with-rest"))


def with_first_moment_masks(share: float, dense_steps: int) -> None:
    """Train with gradients of which a mask lets through the ``share`` with the largest first moments, per parameter.

    As SCAPE (arXiv 2607.01678) chooses what to send, with masks one step old. What is not sent comes later. The first
    ``dense_steps`` steps send all.
    """

    def mask(gradient: Tensor, wanted: Tensor, moment: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        sent, new_moment = wanted, torch.lerp(moment, gradient, 0.1)
        if steps >= dense_steps:
            largest = moment.abs().flatten().topk(math.ceil(share * moment.numel())).indices
            kept = torch.zeros_like(wanted).flatten()
            kept[largest] = wanted.flatten()[largest]
            sent = kept.view_as(wanted)
        return sent, new_moment

    with_changed_gradients(mask)


def with_ternary_codes(thresholds: list[float], betas: list[float]) -> None:
    """Train with three levels in place of four at 2 bits: 0 below a threshold times the block's RMS, else +-level.

    The level is the mean of what is not zero. Sent as the code mean sends blocks with many zeros, so the bytes that are
    counted are those of 2 bits; what an entropy coder would take is printed at the end. Thresholds, and LoCo's betas
    where they are given, go in a straight line from the first to the last over the run.
    """
    by_mean, has_kernels, encode = quantization._quantize_by_mean, WireFormat._has_kernels, ErrorFeedback.encode
    coded = [0, 0]  # values that are not zero, values
    steps = int(sys.argv[sys.argv.index("--train-iters") + 1])
    threshold = thresholds[0]

    def at(progress: float, ends: list[float]) -> float:
        return ends[0] + progress * (ends[-1] - ends[0])

    def encode_at_step(feedback: ErrorFeedback, *arguments: Any, **options: Any) -> Tensor:
        nonlocal threshold
        threshold = at(feedback.steps / steps, thresholds)
        nonzero_share = math.erfc(threshold / math.sqrt(2))  # of normally distributed values
        STEPS[2] = (math.sqrt(math.pi / 2 / nonzero_share), STEPS[2][1])  # scales.py reads levels' mean square off it
        if betas:
            feedback.config = replace(feedback.config, beta=at(feedback.steps / steps, betas))
        return encode(feedback, *arguments, **options)

    def by_threshold(
        values: Tensor, absmax: Tensor, code: Code, uniform: Tensor | None, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if code.bits != 2:
            return by_mean(values, absmax, code, uniform, sizes)
        size = torch.as_tensor(values.shape[-1]) if sizes is None else sizes
        rms = (values.square().sum(dim=-1) / size).sqrt()
        is_large = values.abs() > threshold * rms.unsqueeze(-1)
        level = (values.abs() * is_large).sum(dim=-1) / is_large.sum(dim=-1).clamp(min=1)
        level = torch.where(absmax.isfinite(), level, torch.nan)
        coded[0] += int(is_large.sum())
        coded[1] += int(size.sum()) if size.ndim else int(size) * absmax.numel()
        # A scale below zero says that levels are c s; the scale of a block of zeros is 0.
        signed = torch.where(level > 0, -level, level)
        return (values.sign() * is_large).to(torch.int8), quantization.as_sent(signed, code)

    ErrorFeedback.encode = encode_at_step  # type: ignore[assignment, method-assign]
    quantization._quantize_by_mean = by_threshold
    WireFormat._has_kernels = lambda self, *types: self.bits != 2 and has_kernels(self, *types)  # type: ignore[method-assign]
    main(GPT)
    share = coded[0] / coded[1]
    entropy = share - share * math.log2(share) - (1 - share) * math.log2(1 - share)
    print(f"ternary codes: {share:.4f} are not zero, {entropy:.3f} bits with their signs")


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
    parser.add_argument("--trial", required=True, help=f"{', '.join(LIMITS)}, {', '.join(TRIALS)}")
    arguments, sys.argv[1:] = parser.parse_known_args()
    name, _, value = arguments.trial.partition(":")
    if name == "ternary":
        thresholds, _, betas = value.partition(":")
        with_ternary_codes(
            [float(end) for end in thresholds.split("-")], [float(end) for end in betas.split("-") if end]
        )
    elif name == "outliers":
        with_outliers(float(value))
    elif name == "first-moments":
        share, _, dense_steps = value.partition(":")
        with_first_moment_masks(float(share), int(dense_steps))
    else:
        with_limited_elements(name)
