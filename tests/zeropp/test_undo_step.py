"""What an undone step, a skipped one and frozen parameters leave of LoCo's errors and of scales of elements."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zeropp import LoCoConfig
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import ALL_FLAGS, TiedNet, backward, shard, token_batch

CASES = {  # LoCo, the micro-batches of a step, and the hops with errors
    "between nodes": (LoCoConfig(), 1, ["inter"]),
    # An undone step counts for no reset.
    "both hops": (LoCoConfig(hops="both", reset_interval=3), 2, ["inter", "intra"]),
    "without a copy": (LoCoConfig(exact_undo=False), 1, ["inter"]),
}


def states_of_step_1(loco, num_micro_batches, before):
    """LoCo's state and the gradients of step 1 after these steps: 0 is taken, and 8 undone."""
    model = TiedNet().eval()
    zeropp = shard(model, replace(ALL_FLAGS, loco=loco, gradient_element_scales=loco.exact_undo), model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(*batch: int) -> torch.Tensor:
        return model(*token_batch(*batch)).mean() * (1e30 if batch[0] == 8 and not loco.exact_undo else 1.0)

    for step in before:
        backward(zeropp, loss_of, step, num_micro_batches)
        if step == 0:
            optimizer.step()
        if step == 8 or not loco.exact_undo:  # after the optimizer's step it is too late: the errors stay
            zeropp.undo_step()
        model.zero_grad()
    backward(zeropp, loss_of, 1, num_micro_batches)
    gradients = {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
    return zeropp.state_dict() | gradients


def _undone(name):
    """Whether a state after an undone step equals one without it, and the hops that have errors in it."""
    loco, num_micro_batches, _ = CASES[name]
    expected = states_of_step_1(loco, num_micro_batches, (0,) if loco.exact_undo else ())  # or LoCo begins again
    state = states_of_step_1(loco, num_micro_batches, (0, 8))
    same = state.keys() == expected.keys() and all(value.equal(expected[key]) for key, value in state.items())
    return same, sorted({key.split("/")[-1][:5] for key in state if key.endswith(".error")})


@pytest.mark.parametrize("name", CASES)
def test_an_undone_step_leaves_no_trace(found, name):
    assert found[name] == [(True, CASES[name][2])] * 4


def _two_layers(frozen=None, learning_rate=0.0, fused=False):
    """Two equal layers with LoCo and scales of elements, of which one may be frozen; and a step of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    zeropp = shard(model, replace(ALL_FLAGS, gradient_element_scales=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(factor: float = 1.0, undo: bool = False) -> None:
        x = token_batch(0, 0, dist.get_rank())[0].float().repeat(1, 8)[:, :64]
        scaler.scale(factor * model(x).square().mean()).backward()
        scale = scaler.get_scale()
        if not undo:
            scaler.step(optimizer)
            scaler.update()
        if undo or scaler.get_scale() < scale:
            zeropp.undo_step()
        optimizer.zero_grad()

    return model, zeropp, step


def _skipped_by_a_scaler(fused):
    """Whether weights and state are as before after a step that overflowed; and whether the next one moves weights."""
    model, zeropp, step = _two_layers(None, 1e-3, fused)
    step()
    step()
    before, weight = {n: v.clone() for n, v in zeropp.state_dict().items()}, model[0].weight.to_local().clone()
    step(factor=1e38)
    after, stays = zeropp.state_dict(), weight.equal(model[0].weight.to_local())
    same = stays and after.keys() == before.keys() and all(after[name].equal(before[name]) for name in before)
    step()
    return same, not weight.equal(model[0].weight.to_local())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skipped_can_be_undone(found, fused):
    """A fused optimizer is called, and does nothing on the device."""
    assert found[f"fused {fused}"] == [(True, True)] * 4


def _errors_after_freezing():
    """LoCo's errors where a layer was unfrozen and the step undone, beside a model's that begins so."""

    def error_of(zeropp):
        return next(value for name, value in zeropp.state_dict().items() if name.endswith("inter.error"))

    pairs = []
    for unfrozen in (None, 0):  # more parameters are trained then, or others
        model, zeropp, step = _two_layers(1)
        step()
        model[1].requires_grad_(True)
        if unfrozen is not None:
            model[unfrozen].requires_grad_(False)
        step(undo=True)
        step()
        _, fresh, fresh_step = _two_layers(unfrozen)
        fresh_step()
        pairs.append((error_of(zeropp), error_of(fresh)))
    return pairs


def test_errors_of_frozen_parameters_do_not_come_back_with_an_undone_step(found):
    for pairs in found["frozen"]:
        assert all(error.any() and error.equal(fresh) for error, fresh in pairs)


def _loaded_elsewhere():
    """The warnings where a state is loaded into a model that trains the same parameters, others, and all."""
    _, zeropp, step = _two_layers(1)
    step()
    messages = []
    for frozen in (1, 0, None):
        _, other, other_step = _two_layers(frozen)
        with CapturedWarnings() as warnings:
            other.load_state_dict(zeropp.state_dict())
        messages.append(warnings.messages)
        other_step()
    return messages


def test_state_of_other_trainable_parameters_is_left_out_with_a_warning(found):
    same, *others = found["loaded"][0]  # rank 0 says it
    assert same == [] and all("other frozen" in message for (message,) in others)


@pytest.fixture(scope="module")
def found():
    functions = {name: partial(_undone, name) for name in CASES}
    functions |= {f"fused {fused}": partial(_skipped_by_a_scaler, fused) for fused in (False, True)}
    return run_in_turn(4, functions | {"frozen": _errors_after_freezing, "loaded": _loaded_elsewhere})
