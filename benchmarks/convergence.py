"""Do SGD and Adam keep their rates of convergence under low-bit gradients with LoCo? Its theorem, on a small problem.

    python benchmarks/convergence.py    # results/convergence.json and .png; a minute

Logistic regression with the non-convex penalty sum x^2 / (1 + x^2), 8 workers with 64 samples each of 1,024 features
whose sizes span three orders of magnitude, mini-batches of 4. Learning rates fall as 1 / sqrt(T). Shown is the mean
over the run of the squared norm of the full gradient, which the theorems bound by O(1 / sqrt(T)).
"""

import json
import math
import statistics

import torch
from common import RESULTS, markdown_table, origin
from torch import Tensor

from megatron_zpp.zeropp.wire.quantization import Code, dequantize_blocks, quantize_blocks

PATH = RESULTS / "convergence.json"
WORKERS, SAMPLES, FEATURES, BATCH, BLOCK = 8, 64, 1024, 4, 128
PENALTY, SEEDS = 0.01, (1, 2, 3)
HORIZONS = (250, 500, 1000, 2000, 4000)
CODE = Code(2, "absmax")  # three levels
BETAS = {"fp32": None, "2 bits": None, "2 bits, error feedback": 0.0, "2 bits, LoCo": 0.8}
RATES = {"SGD": 2.0, "Adam": 0.02}  # at T = 250


def sent(values: Tensor) -> Tensor:
    """What arrives of each worker's gradient [W, F] after quantization in blocks."""
    codes, scales = quantize_blocks(values.unflatten(1, (-1, BLOCK)), CODE)
    return dequantize_blocks(codes, scales, CODE).flatten(1)


def gradients(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Return each worker's gradient [W, F] at x [F], for features [W, B, F] and labels [W, B] of -1 and 1."""
    slopes = -labels * torch.sigmoid(-labels * (features @ x))
    return torch.einsum("wb,wbf->wf", slopes, features) / labels.shape[1] + PENALTY * 2 * x / (1 + x.square()).square()


def mean_squared_norm(arm: str, optimizer: str, steps: int, seed: int) -> float:
    """Train for ``steps``; return the mean over them of the full gradient's squared norm."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1.5, 1.5, FEATURES)[torch.randperm(FEATURES, generator=random)]
    features = torch.randn(WORKERS, SAMPLES, FEATURES, generator=random) * sizes / FEATURES**0.5
    labels = (features @ (torch.randn(FEATURES, generator=random) / sizes)).sign()
    x, rate = torch.zeros(FEATURES), RATES[optimizer] * math.sqrt(HORIZONS[0] / steps)
    error, mean, square, total = torch.zeros(WORKERS, FEATURES), torch.zeros(FEATURES), torch.zeros(FEATURES), 0.0
    for step in range(1, steps + 1):
        total += float(gradients(x, features, labels).mean(0).square().sum())
        rows = torch.randint(SAMPLES, (WORKERS, BATCH), generator=random)
        batch = torch.gather(features, 1, rows.unsqueeze(2).expand(-1, -1, FEATURES))
        own = gradients(x, batch, labels.gather(1, rows))  # g
        beta = BETAS[arm]
        if beta is not None:
            compensated = own + error  # h
            own = sent(compensated)
            error = beta * error + (1 - beta) * (compensated - own)
        elif arm != "fp32":
            own = sent(own)
        gradient = own.mean(0)
        if optimizer == "Adam":
            mean = torch.lerp(mean, gradient, 0.1)
            square = torch.lerp(square, gradient.square(), 0.01)
            gradient = mean / (1 - 0.9**step) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        x = x - rate * gradient
    return total / steps


def slope(values: list[float]) -> float:
    """The exponent p of c T^p, by least squares of logarithms."""
    xs, ys = (torch.tensor(numbers).log() for numbers in (HORIZONS, values))
    return float(((xs - xs.mean()) * (ys - ys.mean())).sum() / (xs - xs.mean()).square().sum())


def table() -> str:
    lines = [
        [*arm.split(": "), *(f"{value:.3g}" for value in values), f"{slope(values):.2f}"]
        for arm, values in json.loads(PATH.read_text())["curves"].items()
    ]
    return markdown_table(["optimizer", "gradients", *(f"T = {steps}" for steps in HORIZONS), "exponent of T"], lines)


def main() -> None:
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)
    figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    found = {}
    for axes, optimizer in zip(both, RATES, strict=True):
        for arm in BETAS:
            runs = [[mean_squared_norm(arm, optimizer, steps, seed) for seed in SEEDS] for steps in HORIZONS]
            values = found[f"{optimizer}: {arm}"] = [statistics.mean(of_seeds) for of_seeds in runs]
            axes.loglog(HORIZONS, values, marker="o", label=arm)
        axes.set(title=optimizer, xlabel="steps T", ylabel="mean squared norm of the gradient")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(RESULTS / "convergence.png", dpi=120)
    PATH.write_text(json.dumps({**origin(), "curves": found}, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
