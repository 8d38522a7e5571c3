"""Gradients between nodes are waited for as late as may be, and are those that FSDP2 gets at once."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.fsdp.fsdp_unit import FSDPUnit
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import Net, equal, micro_batches, shard

HPZ = ZeroPPConfig(hpz_partition_size=2, quantized_gradients=True)
MOVES = ZeroPPConfig(
    hpz_partition_size=2,
    quantized_weights=True,
    weight_moves=True,
    quantized_gradients=True,
    loco=LoCoConfig(),
)
X = torch.linspace(-1, 1, 2 * 48).view(2, 48)


def build(config, dtype=None, offload=None):
    """Three blocks and a head that belongs to the root; a bias of fewer elements than ranks."""
    model = Net(width=48, hidden=65, outputs=3)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    zeropp = shard(model, config, model.blocks, mp_policy=policy, offload_policy=offload or OffloadPolicy())
    return model, zeropp


def at_once():
    return patch.object(FSDPUnit, "is_read_in_backward", True)


def _order_of_a_backward_pass():
    """Record sends between nodes, and waits, in the order of a backward pass."""
    from megatron_zpp.zeropp.reduce import reduce_scatter

    events = []
    send = reduce_scatter.start_exchange

    def recorded(gradients, hop, *arguments):
        if hop.name == "intra":
            return send(gradients, hop, *arguments)
        events.append(f"send {hop.name} {hop.unit.label}")
        exchange = send(gradients, hop, *arguments)
        wait = exchange.work.wait

        class Work:
            def wait(self):
                events.append(f"wait {hop.name} {hop.unit.label}")
                wait()

        return replace(exchange, work=Work())

    model, _ = build(HPZ)
    with patch.object(reduce_scatter, "start_exchange", recorded):
        model(X).sum().backward()
    return events


def test_no_gradients_between_nodes_are_waited_for_before_all_have_left(found):
    units = ["blocks.2", "blocks.1", "blocks.0", "the root module"]
    expected = [f"send inter {unit}" for unit in units] + [f"wait inter {unit}" for unit in units]
    for events in found["order"]:
        assert sorted(events[:4]) == sorted(expected[:4])
        assert [event.replace("wait", "send") for event in events[4:]] == events[:4]


GRADIENT_CASES = {
    "bf16, a unit reduced twice": {"dtype": torch.bfloat16, "order": (0, 0, 1, 1, 2, 2)},
    "offloaded": {"offload": CPUOffloadPolicy(pin_memory=False)},
}


def _gradients(late):
    """After two steps of two micro-batches without zero_grad in between: gradients, and the state."""
    found = {}
    for name, case in GRADIENT_CASES.items():
        order, options = case.get("order"), {key: value for key, value in case.items() if key != "order"}
        with nullcontext() if late else at_once():
            model, zeropp = build(MOVES, **options)
            for step in range(2):
                for i in micro_batches(zeropp, 2):
                    model(X * (1 + step + i + dist.get_rank()), order).square().mean().backward()
            gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
            found[name] = gradients, zeropp.state_dict(), [unit.holds_gradients for unit in zeropp.units]
    return found


def test_late_gradients_are_those_that_fsdp2_gets_at_once(found):
    for late, early in zip(found["late gradients"], found["gradients at once"], strict=True):
        for name in GRADIENT_CASES:
            gradients, state, holds = late[name]
            expected, expected_state, _ = early[name]
            assert any(gradient.any() for gradient in gradients)
            for gradient, other in zip(gradients, expected, strict=True):
                assert gradient.dtype == torch.float32 and gradient.equal(other), name
            assert all(value.equal(expected_state[key]) for key, value in state.items())
            assert not any(holds)


def _read_in_backward():
    """Gradients as hooks in the backward pass see them, and as they are behind it."""
    model, _ = build(HPZ)
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.update({n: p.grad.to_local().clone()}))
    model(X).square().mean().backward()
    in_hooks = all(
        seen[name].equal(p.grad.to_local()) and p.grad.full_tensor().any() for name, p in model.named_parameters()
    )

    other, _ = build(HPZ)
    reduced = []
    for module in (*other.blocks, other):
        module.set_all_reduce_hook(lambda gradient: reduced.append(gradient.clone()))
    other(X).square().mean().backward()
    same = all(p.grad.equal(q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    return in_hooks, same and any(gradient.any() for gradient in reduced)


def test_hooks_in_the_backward_pass_see_whole_gradients(found):
    assert found["hooks"] == [(True, True)] * 4


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def _after_a_failed_backward():
    """Gradients of a step after one whose backward pass was ended by an exception, and those without that one."""
    results = []
    for fails in (True, False):
        # Exact weights: what was reduced counts as a step, and differences would be sent again.
        model, zeropp = build(replace(HPZ, loco=LoCoConfig(), gradient_element_scales=True))
        model.head.requires_grad_(False)  # FSDP2 itself keeps what a unit that it did not come to has got
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, message = torch.optim.SGD(parameters, lr=0.01), ""
        if fails:
            fail = model.blocks[1].register_forward_pre_hook(lambda module, args: (Fails.apply(args[0]),), prepend=True)
            with pytest.raises(ZeroDivisionError):
                model(3 * X).square().mean().backward()  # blocks 2 and 1 have left
            fail.remove()
            with pytest.raises(RuntimeError) as refusal:
                optimizer.step()
            message = str(refusal.value)
            zeropp.undo_step()
            optimizer.zero_grad()
            model.reset_iter_state()
        model(X).square().mean().backward()
        gradients = [parameter.grad.to_local().clone() for parameter in parameters]
        optimizer.step()
        results.append((gradients, zeropp.state_dict(), message))
    return results


CAN_FAIL = hasattr(FSDPModule, "reset_iter_state")


@pytest.mark.skipif(not CAN_FAIL, reason="this torch's FSDP2 cannot go on after a failed backward pass")
def test_a_failed_backward_pass_leaves_nothing_behind(found):
    for (gradients, state, message), (expected, expected_state, _) in found["failed"]:
        assert "had not crossed nodes" in message
        assert equal(gradients, expected)
        assert all(value.equal(expected_state[key]) for key, value in state.items())


@pytest.fixture(scope="module")
def found():
    functions = {
        "order": _order_of_a_backward_pass,
        "late gradients": partial(_gradients, late=True),
        "gradients at once": partial(_gradients, late=False),
        "hooks": _read_in_backward,
    }
    return run_in_turn(4, functions | ({"failed": _after_a_failed_backward} if CAN_FAIL else {}))
