"""Do SGD and Adam keep their rates of convergence under low-bit gradients with LoCo? Its theorem, on a small problem.

    python benchmarks/convergence.py    # results/convergence.json; ten minutes

Logistic regression with the non-convex penalty sum x^2 / (1 + x^2), 8 workers with 64 samples each of 1,024 features
whose sizes span three orders of magnitude, mini-batches of 4. Learning rates fall as 1 / sqrt(T); each arm has the best
of five on other seeds. Shown is the mean over the run of the squared norm of the full gradient, which the theorems
bound by O(1 / sqrt(T)).
"""

import json
import math
import statistics

import torch
from common import RESULTS, markdown_table, origin
from study_tables import difference
from torch import Tensor

from megatron_zpp.zeropp.config import LoCoConfig
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire.format import GradientSum, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

PATH = RESULTS / "convergence.json"
WORKERS, SAMPLES, FEATURES, BATCH, BLOCK = 8, 64, 1024, 4, 128
PENALTY, SEEDS, SEARCH_SEEDS = 0.01, (1, 2, 3, 4, 5, 6, 7, 8), (101, 102)
HORIZONS = (250, 500, 1000, 2000, 4000)
HOP = wire_format((ParameterShard("x", FEATURES, True),), 2, BLOCK, torch.float32, "absmax")  # three levels
BETAS = {"fp32": None, "2 bits": None, "2 bits, error feedback": 0.0, "2 bits, LoCo": 0.8}
RATES = {"SGD": 2.0, "Adam": 0.02}  # at T = 250, times one of FACTORS
FACTORS = (0.0625, 0.125, 0.25, 0.5, 1.0)


def gradients(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Return each worker's gradient [W, F] at x [F], for features [W, B, F] and labels [W, B] of -1 and 1."""
    slopes = -labels * torch.sigmoid(-labels * (features @ x))
    return torch.einsum("wb,wbf->wf", slopes, features) / labels.shape[1] + PENALTY * 2 * x / (1 + x.square()).square()


def mean_squared_norm(arm: str, optimizer: str, factor: float, steps: int, seed: int) -> float:
    """Train for ``steps``; return the mean over them of the full gradient's squared norm."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1.5, 1.5, FEATURES)[torch.randperm(FEATURES, generator=random)]
    features = torch.randn(WORKERS, SAMPLES, FEATURES, generator=random) * sizes / FEATURES**0.5
    labels = (features @ (torch.randn(FEATURES, generator=random) / sizes)).sign()
    x, rate = torch.zeros(FEATURES), factor * RATES[optimizer] * math.sqrt(HORIZONS[0] / steps)
    mean, square, total = torch.zeros(FEATURES), torch.zeros(FEATURES), 0.0
    beta = BETAS[arm]
    feedback = None if beta is None else ErrorFeedback(LoCoConfig(beta=beta, reset_interval=None))
    for step in range(1, steps + 1):
        total += float(gradients(x, features, labels).mean(0).square().sum())
        rows = torch.randint(SAMPLES, (WORKERS, BATCH), generator=random)
        batch = torch.gather(features, 1, rows.unsqueeze(2).expand(-1, -1, FEATURES))
        own = gradients(x, batch, labels.gather(1, rows))  # g
        if feedback is not None:
            own = HOP.decode(feedback.compensate(GradientSum(own), HOP), torch.empty_like(own))
        elif arm != "fp32":
            own = HOP.decode(HOP.encode(own), torch.empty_like(own))
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
    """Mean squared norms by number of steps, the exponent, and the longest run over fp32, paired by seed."""
    lines = []
    arms: dict[str, dict[str, list[list[float]]]] = json.loads(PATH.read_text())["arms"]
    for name, arm in arms.items():
        optimizer, gradients_in = name.split(": ")
        means = [statistics.mean(of_seeds) for of_seeds in arm["norms"]]
        longest = zip(arm["norms"][-1], arms[f"{optimizer}: fp32"]["norms"][-1], strict=True)
        over = "" if gradients_in == "fp32" else difference([100 * (ours / fp32 - 1) for ours, fp32 in longest])
        cells = [f"{value:.3g}" for value in (arm["rate"], *means)]
        lines.append([optimizer, gradients_in, *cells, f"{slope(means):.2f}", over])
    horizons = [f"T = {steps}" for steps in HORIZONS]
    return markdown_table(["optimizer", "gradients", "rate", *horizons, "exponent of T", "over fp32"], lines)


def measure(arm: str, optimizer: str) -> dict[str, object]:
    """Choose the learning rate, and train for each number of steps with each seed."""

    def search(factor: float) -> float:
        return sum(mean_squared_norm(arm, optimizer, factor, 1000, seed) for seed in SEARCH_SEEDS)

    best = min(FACTORS, key=search)
    norms = [[mean_squared_norm(arm, optimizer, best, steps, seed) for seed in SEEDS] for steps in HORIZONS]
    return {"rate": best * RATES[optimizer], "norms": norms}


def main() -> None:
    torch.set_num_threads(1)
    arms = {f"{optimizer}: {arm}": measure(arm, optimizer) for optimizer in RATES for arm in BETAS}
    PATH.write_text(json.dumps({**origin(), "arms": arms}, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
