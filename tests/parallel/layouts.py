"""Training on real ranks in some layout, and comparing it with one rank's."""

import contextlib
import gc
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.training.small_run import Metrics, flags, start, train_quietly

TIMEOUT = 600.0  # per call with several runs of several ranks
# Adam's eps: a key's bias has no gradient but rounding errors, which Adam would blow up to whole steps.
EPS = "--adam-eps 1e-5"
COMPARED = ("lm loss", "lm loss validation", "grad-norm", "params-norm")

Run = tuple[str, list[str]]  # architecture and command line
Result = tuple[Metrics, dict[str, Tensor], str]  # metrics, whole parameters by their names in the model, printed text


def train_runs(runs: dict[str, Run]) -> dict[str, Result]:
    """For ``run_ranks``: each run's result, as far as this rank knows it."""
    results = {}
    for name, (architecture, argv) in runs.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run, metrics = start(argv, architecture)
        text = out.getvalue() + train_quietly(run)
        parameters = get_model_state_dict(run.model)
        parameters = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in parameters.items()}
        results[name] = metrics, parameters, text
        if run.lock is not None:
            run.lock.release()
        del run
        gc.collect()  # a model and its hooks hold each other
    return results


def results_on(world_size: int, runs: dict[str, Run], islands: int = 1) -> dict[str, Result]:
    """Each run's metrics and text of the rank that logs, and all parameters.

    All ranks of the last island must know the same losses, and those that share a parameter agree on it to the bit.
    """
    of_ranks: list[dict[str, Any]] = run_ranks(world_size, train_runs, runs, timeout=TIMEOUT)
    merged: dict[str, Result] = {}
    for name in runs:
        parameters: dict[str, Tensor] = {}
        metrics, _, out = of_ranks[-1][name]
        for results in of_ranks[-(world_size // islands) :]:
            assert results[name][0]["lm loss"] == metrics["lm loss"], f"{name}: losses differ between ranks"
        for results in of_ranks:
            for key, value in results[name][1].items():
                assert torch.equal(parameters.setdefault(key, value), value), f"{name}: {key} differs between ranks"
        merged[name] = metrics, parameters, of_ranks[0][name][2] + out
    return merged


def assert_same(result: Result, expected: Result, name: str, tolerance: float = 1e-5) -> None:
    """Metrics of the same steps, relatively, and parameters at the end, absolutely."""
    for key in COMPARED:
        ours = result[0].get(key, [])
        torch.testing.assert_close(
            ours,
            expected[0].get(key, [])[len(expected[0].get(key, [])) - len(ours) :],
            rtol=tolerance,
            atol=0,
            msg=lambda text, key=key: f"{name}, {key}: {text}",
        )
    assert len(result[0]["lm loss"]) > 0
    assert result[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        torch.testing.assert_close(
            result[1][key], value, rtol=0, atol=tolerance, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )


def assert_trains_as_one_rank(
    data: str,
    architecture: str,
    common: str,
    layouts: dict[int, dict[str, str]],
    *,
    changing: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    tolerance: float = 1e-5,
) -> dict[str, Result]:
    """Compare runs in ``layouts``, flags by number of ranks and name, with one rank's, which are returned.

    changing: flags that one rank has too if a layout has them; each changes the losses. also: more metrics to compare.
    """

    def alone(more: str) -> str:
        return " ".join(of for of in changing if of in more)

    def train(world_size: int, runs: dict[str, str]) -> dict[str, Result]:
        return results_on(world_size, {k: (architecture, flags(data, common, more)) for k, more in runs.items()})

    expected = train(1, {alone(more): alone(more) for runs in layouts.values() for more in runs.values()})
    last_losses = sorted(result[0]["lm loss"][-1] for result in expected.values())
    assert all(larger - smaller > 1e-4 for smaller, larger in itertools.pairwise(last_losses)) or not changing
    for world_size, runs in layouts.items():
        for name, result in train(world_size, runs).items():
            one = expected[alone(runs[name])]
            assert_same(result, one, name, tolerance)
            for key in also:
                few = 2 if key == "num-zeros" else 0  # sums in another order are zero elsewhere
                assert result[0][key] == pytest.approx(one[0][key], rel=1e-5, abs=few), f"{name}, {key}"
    return expected
