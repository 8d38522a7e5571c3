"""Checkpoints that commit 7225eee saved, ``of_7225eee/``, go on as they did there.

``runs.json`` has for each the ranks, trainer and flags of its run, saved at step 2 of 4, and the losses of 3 and 4.
One process that emulated four ranks saved "emulated", which goes on with four real ones. They are not made again: a
change that cannot load them breaks users' runs.
"""

import json
from pathlib import Path

import pytest

from megatron_zpp.checkpoint import iterate_parameters, read_meta
from tests.ranks import run_ranks
from tests.training.small_run import train_each

OLD = Path(__file__).parent / "of_7225eee"
RUNS = json.loads((OLD / "runs.json").read_text())


@pytest.mark.parametrize("ranks, trainer", sorted({(run["ranks"], run["trainer"]) for run in RUNS.values()}))
def test_they_go_on(ranks, trainer):
    """With optimizer, LoCo's errors, weight copies, islands and loss scale: losses are as they were.

    fp32 sums differ between processors in their last bits; codes of few bits then differ here and there. What was sent
    as weight differences, a format that is gone, goes on as moved codes, without LoCo's errors.
    """
    runs = {name: run for name, run in RUNS.items() if (run["ranks"], run["trainer"]) == (ranks, trainer)}
    argv = {name: [*run["flags"].split(), "--load", str(OLD / name)] for name, run in runs.items()}
    per_rank = run_ranks(ranks, train_each, argv, trainer)
    for name, run in runs.items():
        losses = [sum(step) / ranks for step in zip(*(rank[name]["lm loss"] for rank in per_rank), strict=True)]
        assert losses == pytest.approx(run["losses"], rel=1e-3 if "difference" in name else 5e-5), name


@pytest.mark.parametrize("name", RUNS)
def test_their_parameters_and_settings_can_be_read(name):
    """By whoever has no ranks: export, evaluation, generation."""
    checkpoint = OLD / name / "iter_0000002"
    meta = read_meta(checkpoint)
    assert meta["settings"]["hidden_size"] == 16 and meta["counters"]["iteration"] == 2
    parameters = dict(iterate_parameters(checkpoint, meta))
    assert parameters and all(tensor.isfinite().all() for tensor in parameters.values())
