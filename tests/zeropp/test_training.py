"""ZeRO++ under real FSDP2 training: equal to plain FSDP2 without quantization, and right in every FSDP2 situation."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.fsdp.fsdp_unit import FSDPUnit
from megatron_zpp.zeropp.gather import changed_weights
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import HAS_UNUSED_SWITCH, own_state
from tests.zeropp.training_on_ranks import (
    ALL_FLAGS,
    HIERARCHY_ONLY,
    TiedNet,
    equal,
    shard,
    token_batch,
    train,
)
from tests.zeropp.training_on_ranks import step as train_step

OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def trained(config, num_steps, optimizer="fused", reshard=True, has_frozen=False, dtype=None):
    """Outputs of an evaluation after each step, and the weights at the end."""
    model, outputs = TiedNet(has_frozen), []
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    zeropp = shard(model, config, model.layers, reshard_after_forward=reshard, mp_policy=policy)
    if HAS_UNUSED_SWITCH:
        model.set_reduce_scatter_unused_params(True)

    @torch.no_grad()
    def evaluate(_):
        outputs.append(model(*token_batch(9, 9, 9)).mean().item())

    weights = train(
        model,
        zeropp,
        lambda *batch: model(*token_batch(*batch)).mean() / 2,
        num_steps,
        num_micro_batches=2,
        optimizer=OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad]),
        after_step=evaluate,
    ).weights
    return outputs, weights


def plain_and(config, *args, **options):
    return trained(None, *args, **options), trained(config, *args, **options)


UNQUANTIZED = [("fused", True, False), ("foreach", True, True), ("sgd", False, False)]


@pytest.mark.parametrize("optimizer", [case[0] for case in UNQUANTIZED])
def test_without_quantization_training_equals_fsdp2(found, optimizer):
    """In fp32 sums are taken in another order, hence 1e-5; a stale or mixed-up weight would be off by percents."""
    for (plain_outputs, plain), (outputs, ours) in found[optimizer]:
        assert outputs == pytest.approx(plain_outputs, rel=1e-5)
        for p, q in zip(plain, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)


def test_all_flags_train_close_to_fsdp2_and_alike_on_all_ranks(found):
    expected, weights = found["all flags"][0][1]
    for (plain_outputs, _), (outputs, ours) in found["all flags"]:
        assert outputs[-1] == pytest.approx(plain_outputs[-1], rel=0.1)
        assert outputs == expected and equal(ours, weights)


# Refusals


def _without_fsdp():
    apply_zeropp(nn.Linear(4, 4), ALL_FLAGS)


def _hsdp(config=ALL_FLAGS, hook=None):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if hook is not None:
        model.set_all_reduce_hook(hook)
    apply_zeropp(model, config)


def _applied_twice():
    model = nn.Linear(4, 4)
    shard(model, ALL_FLAGS)
    apply_zeropp(model, ALL_FLAGS)


def _memory_of_the_process_group():
    model = nn.Linear(4, 4)
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    apply_zeropp(model, ALL_FLAGS)


def _mixed_dtypes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False))
    shard(model, ALL_FLAGS)
    model(torch.ones(1, 4))


def _with_a_sharded_part():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    apply_zeropp(model, ALL_FLAGS)
    return model


def _sharded_later(sibling):
    model = _with_a_sharded_part()
    fully_shard(model[1] if sibling else model)
    model(torch.ones(1, 4))


def _other_collectives_later():
    model, other = _with_a_sharded_part(), _with_a_sharded_part()
    model(torch.ones(1, 4))
    model[0].set_custom_all_gather(other[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm)
    model(torch.ones(1, 4))


def _in_a_cuda_graph(is_reduced):
    model = nn.Linear(4, 4)
    shard(model, ALL_FLAGS)
    # What cannot run here: a GPU, and a capture on it. The root stays whole for its backward pass.
    loss = model(torch.ones(1, 4)).sum() if is_reduced else None
    with (
        patch.object(FSDPUnit, "device", property(lambda _: torch.device("cuda"))),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        loss.backward() if is_reduced else model(torch.ones(1, 4))


IN_A_GRAPH = "cannot be gathered or reduced in a CUDA graph"
REFUSED = {
    "without FSDP2": (_without_fsdp, "call torch.distributed.fsdp.fully_shard on it first"),
    "HSDP": (_hsdp, "HSDP"),
    "an all-reduce hook": (partial(_hsdp, ZeroPPConfig(), print), "has an all-reduce hook already"),
    "applied twice": (_applied_twice, "(UnitAllGather, UnitReduceScatter), which ZeRO++ would replace"),
    "memory of the process group": (
        _memory_of_the_process_group,
        "(ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter)",
    ),
    "a mesh after forward": (
        partial(shard, nn.Linear(4, 4), ALL_FLAGS, reshard_after_forward=2),
        "reshard_after_forward=<int>",
    ),
    "mixed dtypes": (_mixed_dtypes, "param_dtype=...), as for fp32 adapters on a bf16 base"),
    "a root sharded later": (
        partial(_sharded_later, False),
        "fully_shard was called on the root module after apply_zeropp",
    ),
    "a sibling sharded later": (partial(_sharded_later, True), "fully_shard was called on 1 after apply_zeropp"),
    "other collectives": (_other_collectives_later, "the collectives of 0 were replaced"),
    "a gather in a CUDA graph": (partial(_in_a_cuda_graph, False), IN_A_GRAPH),
    "a reduction in a CUDA graph": (partial(_in_a_cuda_graph, True), IN_A_GRAPH),
}


def _refused():
    messages = {}
    for name, (build, _) in REFUSED.items():
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            build()
        messages[name] = str(refusal.value)
    return messages


def test_what_is_not_supported_is_refused_by_name_on_every_rank(found):
    for messages in found["_refused"]:
        for name, (_, message) in REFUSED.items():
            assert message in messages[name], name


# What programs do between steps


def _forgiving():
    """Return traces of an Inf in one step, of dropped micro-batches, and of an undo after a good step."""
    model = nn.Linear(64, 64)
    zeropp = shard(model, ALL_FLAGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.full((8, 64), torch.inf)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    after_inf = model.bias.grad.full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    before = own_state(zeropp)["gradients/root/inter.error"].clone()
    zeropp.undo_step()  # an exception before anything was reduced: the good step stays
    untouched = own_state(zeropp)["gradients/root/inter.error"].equal(before)

    zeropp.set_is_last_micro_batch(False)
    model(torch.full((8, 64), 1000.0)).sum().backward()
    optimizer.zero_grad()
    zeropp.undo_step()
    zeropp.set_is_last_micro_batch(True)
    model(torch.ones(8, 64)).sum().backward()
    dropped = model.bias.grad.full_tensor()
    optimizer.zero_grad()

    zeropp.set_is_last_micro_batch(False)
    model(torch.ones(8, 64)).sum().backward()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    other.step()  # another model's optimizer
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    with pytest.raises(RuntimeError, match="had not crossed nodes"):
        optimizer.step()
    zeropp.undo_step()
    optimizer.step()
    return after_inf, untouched, dropped, stepped


def _undone():
    """Whether gradients that were not reduced yet, and gradients of unannounced passes, leave no trace."""
    model = nn.Linear(64, 64)
    zeropp = shard(model, ALL_FLAGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.full((8, 64), 1000.0)).sum().backward()
    zeropp.undo_step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(8, 64)).sum().backward()
    bias = model.bias.grad.full_tensor()
    optimizer.step()
    optimizer.zero_grad()

    before = own_state(zeropp)["gradients/root/inter.error"].clone()
    for factor in (3.0, 5.0):
        model(torch.full((8, 64), factor)).sum().backward()
    zeropp.undo_step()
    optimizer.zero_grad()
    return bias, own_state(zeropp)["gradients/root/inter.error"].equal(before)


def _after_a_failed_send():
    """The loss of a step before which sending weights failed, and of one without that."""
    losses = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        zeropp = shard(model, ALL_FLAGS, list(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train_step(model, optimizer, torch.ones(2, 64))
        if fails:
            with patch.object(changed_weights, "start_gathers", side_effect=MemoryError), pytest.raises(MemoryError):
                model(torch.ones(2, 64))
            zeropp.invalidate()
        losses.append(train_step(model, optimizer, torch.ones(2, 64)).item())
    return losses


@pytest.fixture(scope="module")
def found():
    functions = {case[0]: partial(plain_and, HIERARCHY_ONLY, 3, *case) for case in UNQUANTIZED}
    functions["all flags"] = partial(plain_and, ALL_FLAGS, 4, dtype=torch.bfloat16)
    others = (_forgiving, _undone, _after_a_failed_send, _refused)
    return run_in_turn(4, functions | {function.__name__: function for function in others})


def test_an_inf_passes_and_dropped_gradients_are_gone(found):
    after_inf, untouched, dropped, stepped = found["_forgiving"][0]
    torch.testing.assert_close(after_inf, torch.full((64,), 8.0), rtol=1e-2, atol=0)
    assert untouched
    torch.testing.assert_close(dropped, torch.full((64,), 8.0), rtol=1e-2, atol=0)
    assert stepped == [True]  # after undo_step


def test_undone_gradients_leave_no_trace_wherever_they_were(found):
    bias, is_as_before = found["_undone"][0]
    torch.testing.assert_close(bias, torch.full((64,), 8.0), rtol=1e-2, atol=0)
    assert is_as_before


def test_a_program_can_go_on_after_sending_failed(found):
    for failed, expected in found["_after_a_failed_send"]:
        assert failed == pytest.approx(expected, rel=1e-2)
