"""Ranks that differ end with one error on all of them, which names the unit and the ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.description import settings_of_state
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import evaluate, shard, step

PLAIN = ZeroPPConfig(hpz_partition_size=2, quantized_weights=True)
CHECKED = replace(PLAIN, check_agreement=True)


def build(config: ZeroPPConfig):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zeropp = shard(model, config, list(model))
    return model, zeropp, torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def changed_by_the_program(model, zeropp):
    model[1].weight.mul_(2)  # of this rank's shard: nothing is sent


def invalidated(model, zeropp):
    zeropp.invalidate()


@torch.no_grad()
def another_pass(model, zeropp):
    model[1](torch.ones(1, 8))


CASES = {
    changed_by_the_program: (
        (2,),
        ["1: ranks 0, 1, 3 saw no change", "1: rank 2 saw that the program changed parameters"],
    ),
    invalidated: (
        (1, 2),
        [f"{unit}: ranks {found}" for unit in "01" for found in ("0, 3 saw no", "1, 2 saw that the program")],
    ),
    another_pass: ((3,), ["ranks 0, 1, 2 about to gather 0", "rank 3 about to gather 1"]),
}


def _errors():
    """What each rank is told in each case. After an error all ranks are at the same point, and go on to the next."""
    errors = []
    for change, (ranks, _) in CASES.items():
        model, zeropp, _ = build(CHECKED)
        evaluate(model, torch.ones(2, 8))
        try:
            if dist.get_rank() in ranks:
                change(model, zeropp)
            with torch.no_grad():
                model(torch.ones(2, 8))
            errors.append(None)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_all_ranks_name_the_unit_and_the_ranks_that_differ(found):
    for (_, named), *errors in zip(CASES.values(), *found["errors"], strict=True):
        assert len(set(errors)) == 1
        _, *lines, _ = errors[0].splitlines()
        assert len(lines) == len(named)  # and no other unit
        assert all(line.strip().startswith(expected) for line, expected in zip(lines, named, strict=True)), lines


def _evaluations():
    """Passes that send nothing, of which each rank makes as many as it likes."""
    model, zeropp, _ = build(CHECKED)
    with zeropp.resident_weights(), torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            output = model(torch.ones(2, 8))
    return output


def _losses():
    """What the ranks do alike, or what they find out together, is no difference: here a change without a trace."""
    losses = []
    for config in (PLAIN, CHECKED):
        model, zeropp, optimizer = build(config)
        for _ in range(2):
            losses.append(step(model, optimizer, torch.full((2, 8), dist.get_rank() + 1.0)).item())
            if dist.get_rank() == 3:
                model[1].weight.to_local().data.mul_(2)
            with torch.no_grad():
                losses.append(model(torch.ones(2, 8)).sum().item())
        zeropp.load_state_dict(zeropp.state_dict())
        losses.append(step(model, optimizer, torch.full((2, 8), dist.get_rank() + 1.0)).item())
    return losses


@pytest.fixture(scope="module")
def found():
    return run_in_turn(4, {"losses": _losses, "errors": _errors, "evaluations": _evaluations})


def test_nothing_else_changes(found):
    for losses in found["losses"]:
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]


def test_passes_that_send_nothing_are_not_compared(found):
    assert all(output.equal(found["evaluations"][0]) for output in found["evaluations"])


def test_saved_state_does_not_depend_on_it():
    assert settings_of_state(CHECKED) == settings_of_state(PLAIN)


def test_without_effect_it_is_refused():
    with pytest.raises(ValueError, match="check_agreement requires hpz_partition_size"):
        ZeroPPConfig(check_agreement=True)
