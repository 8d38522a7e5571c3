"""The end of a gradient accumulation as FSDP2's own switches say it, which other people's loops set."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.reduce.reduce_scatter import warn_of_accumulation
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import ALL_FLAGS, shard

MICRO_BATCHES, STEPS = 3, 2
IN_A_CLOSURE = "set_is_last_backward, in the optimizer's closure"  # as Lightning's Trainer runs the last
SAID_BY = {
    "ZeRO++": lambda model, zeropp, is_last: zeropp.set_is_last_micro_batch(is_last),
    "set_is_last_backward": lambda model, zeropp, is_last: model.set_is_last_backward(is_last),
    "set_requires_gradient_sync": lambda model, zeropp, is_last: model.set_requires_gradient_sync(is_last),
    IN_A_CLOSURE: lambda model, zeropp, is_last: model.set_is_last_backward(is_last),
    "nobody": lambda model, zeropp, is_last: None,
    # Asked to cross at each, against FSDP2: the loop's own word counts.
    "ZeRO++ against FSDP2": lambda model, zeropp, is_last: (
        model.set_is_last_backward(is_last),
        zeropp.set_is_last_micro_batch(True),
    ),
}


def train(said_by):
    """Losses, bytes that this rank sent to another node in each step, and warnings."""
    warn_of_accumulation.cache_clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))
    zeropp = shard(model, ALL_FLAGS, list(model))
    with CapturedWarnings() as warnings:
        return *_steps(model, zeropp, said_by), warnings.messages


def _steps(model, zeropp, said_by):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses, sent = torch.Generator().manual_seed(dist.get_rank()), [], []

    def micro_batch(is_last):
        SAID_BY[said_by](model, zeropp, is_last)
        x = torch.randn(8, 32, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean() / MICRO_BATCHES
        loss.backward()
        losses.append(loss.item())

    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES - 1):
            micro_batch(False)
        if said_by == IN_A_CLOSURE:
            optimizer.step(lambda: micro_batch(True))
        else:
            micro_batch(True)
            optimizer.step()
        optimizer.zero_grad()
        sent.append(zeropp.traffic.take().inter_node)
    if said_by == IN_A_CLOSURE:
        with pytest.raises(RuntimeError, match="had not crossed nodes"):
            optimizer.step(lambda: micro_batch(False))
    return losses, sent


@pytest.fixture(scope="module")
def trained():
    return run_in_turn(4, {said_by: partial(train, said_by) for said_by in SAID_BY})


def test_fsdp2s_own_switch_means_what_ours_does(trained):
    """To the bit, and with the same bytes."""
    for ours, theirs in zip(trained["ZeRO++"], trained["set_is_last_backward"], strict=True):
        assert ours == theirs
        assert not ours[2]


def test_an_optimizers_closure_may_run_the_last_micro_batch(trained):
    for ours, (losses, sent, _) in zip(trained["set_is_last_backward"], trained[IN_A_CLOSURE], strict=True):
        assert ours[:2] == (losses[:-1], sent)  # but for the one that was refused


def test_micro_batches_without_synchronization_cost_nothing(trained):
    """They are added up before anything is rounded, so that losses differ by what rounding does."""
    for ours, theirs in zip(trained["ZeRO++"], trained["set_requires_gradient_sync"], strict=True):
        assert ours[1] == theirs[1]
        assert theirs[0] == pytest.approx(ours[0], rel=0.02)
        assert not theirs[2]


def test_a_loop_that_says_nothing_is_told_once_what_it_costs(trained):
    """It trains right all the same: gradients are added up after each crossing."""
    gradients = trained["nobody"][0][1][0] - trained["ZeRO++"][0][1][0]  # two more micro-batches' gradients
    for ours, theirs in zip(trained["ZeRO++"], trained["nobody"], strict=True):
        assert theirs[1] == [sent + gradients for sent in ours[1]] and gradients > 0
        assert theirs[0] == pytest.approx(ours[0], rel=0.02)
        assert len(theirs[2]) == 1 and "set_is_last_backward(False)" in theirs[2][0]


def test_what_the_loop_says_to_zeropp_counts(trained):
    assert [of_rank[1] for of_rank in trained["ZeRO++ against FSDP2"]] == [of_rank[1] for of_rank in trained["nobody"]]


KEPT = {
    "hpZ": ZeroPPConfig(hpz_partition_size=2),
    "moved bits": ZeroPPConfig(hpz_partition_size=2, weight_moves=True),
    "resident": ZeroPPConfig(),
}


def train_marked_late(name, is_late):
    """Return the losses of a loop that marks micro-batches before the forward pass or late, before the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    zeropp = shard(model, KEPT[name], list(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    with zeropp.resident_weights() if name == "resident" else nullcontext():
        for index in range(4 * MICRO_BATCHES):
            is_last = index % MICRO_BATCHES == MICRO_BATCHES - 1
            if not is_late:
                model.set_is_last_backward(is_last)
            loss = model(torch.randn(8, 32, generator=generator)).square().mean()
            if is_late:
                model.set_is_last_backward(is_last)
            loss.backward()
            losses.append(loss.item())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def test_no_step_computes_with_the_weights_of_the_step_before_where_the_loop_marks_micro_batches_late():
    calls = {(name, is_late): partial(train_marked_late, name, is_late) for name in KEPT for is_late in (False, True)}
    losses = run_in_turn(4, calls)
    assert all(losses[name, True] == losses[name, False] for name in KEPT)
