"""ZeRO++ under real FSDP2 training: equal to plain FSDP2 without quantization, and right in every FSDP2 situation."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.fsdp.fsdp_unit import FSDPUnit
from tests.ranks import run_ranks
from tests.zeropp.fsdp_model import HAS_UNUSED_SWITCH, CapturedWarnings, needs_unused_switch, own_state

HIERARCHY_ONLY = ZeroPPConfig(
    hpz_partition_size=2, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
)
ALL_FLAGS = ZeroPPConfig(
    quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig(), weight_block_size=64
)


class Net(nn.Module):
    """Tied embeddings, an odd width, a bias of less than one element a rank, and a frozen layer if asked for."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 33)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 33)) for _ in range(3))
        self.head = nn.Linear(33, 50)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        if frozen:
            self.layers[1].requires_grad_(False)
            self.layers[2][0].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.scale * layer(x)
        return self.head(x)


def train(config, num_steps=10, optimizer="fused", num_micro_batches=2, reshard=True, frozen=False, dtype=None):
    """Losses of every step with an evaluation in between, and the full parameters at the end."""
    rank, model = dist.get_rank(), Net(frozen)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    zeropp = apply_zeropp(model, config) if config is not None else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    step_of = {
        "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True),
        "foreach": lambda: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, foreach=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
    }[optimizer]()
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(num_steps):
        for i in range(num_micro_batches):
            tokens = torch.randint(50, (4, 9), generator=generator)
            if zeropp is not None:
                zeropp.set_is_last_micro_batch(i == num_micro_batches - 1)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / num_micro_batches).backward()
        step_of.step()
        step_of.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.arange(40).view(4, 10)).float().square().mean().item())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the evaluation leaves what it gathered
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def _hierarchy_equals_plain(optimizer, reshard, frozen):
    return train(None, optimizer=optimizer, reshard=reshard, frozen=frozen), train(
        HIERARCHY_ONLY, optimizer=optimizer, reshard=reshard, frozen=frozen
    )


@pytest.mark.parametrize(
    "optimizer, reshard, frozen", [("fused", True, False), ("foreach", True, True), ("sgd", False, False)]
)
def test_without_quantization_training_equals_fsdp2(optimizer, reshard, frozen):
    """In fp32 sums are taken in another order, hence 1e-5; a stale or mixed-up weight would be off by percents."""
    for (plain_losses, plain), (losses, ours) in run_ranks(4, _hierarchy_equals_plain, optimizer, reshard, frozen):
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        for p, q in zip(plain, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)


def _all_flags_and_plain(dtype):
    return train(None, num_steps=15, dtype=dtype), train(ALL_FLAGS, num_steps=15, dtype=dtype)


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.long), torch.bfloat16])
def test_all_flags_train_close_to_fsdp2_and_alike_on_all_ranks(dtype):
    results = run_ranks(4, _all_flags_and_plain, dtype)
    for (plain_losses, _), (losses, parameters) in results:
        assert losses[-1] == pytest.approx(plain_losses[-1], rel=0.1)
        assert losses == results[0][1][0]
        assert all(p.equal(q) for p, q in zip(parameters, results[0][1][1], strict=True))


def _changed_parameters():
    """Outputs with the initial weights, with weights tripled behind autograd's back, and with loaded ones."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fully_shard(model)
    zeropp = apply_zeropp(model, ZeroPPConfig(hpz_partition_size=2, weight_difference_bits=4))
    x = torch.ones(1, 64)
    with torch.no_grad():
        initial = model(x).clone()
        model.reshard()
        for p in model.parameters():
            p.to_local().data.mul_(3)
        zeropp.invalidate()
        tripled = model(x).clone()
        model.reshard()
        model.load_state_dict({name: p.detach() * 2 for name, p in model.named_parameters()})
        return initial, tripled, model(x).clone()


def test_changed_parameters_are_gathered_anew_and_loaded_ones_in_full():
    initial, tripled, loaded = run_ranks(4, _changed_parameters)[0]
    torch.testing.assert_close(tripled, 3 * initial, rtol=0.1, atol=0.5)  # 4-bit differences
    torch.testing.assert_close(loaded, 6 * initial, rtol=1e-6, atol=1e-6)


class SometimesUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        return self.second(self.first(x)) if use_second else self.first(x)


def _sometimes_unused(config, left_out=False):
    model = SometimesUnused()
    fully_shard(model)
    zeropp = apply_zeropp(model, config) if config is not None else None
    if left_out and HAS_UNUSED_SWITCH:
        model.set_reduce_scatter_unused_params(False)
    for i, use_second in enumerate([True, False]):
        if zeropp is not None:
            zeropp.set_is_last_micro_batch(i == 1)
        model(torch.full((2, 40), dist.get_rank() + 1.0), use_second).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@needs_unused_switch
def test_a_parameter_unused_in_the_last_micro_batch_keeps_its_gradient():
    plain, ours = run_ranks(4, _sometimes_unused, None)[0], run_ranks(4, _sometimes_unused, HIERARCHY_ONLY)[0]
    for p, q in zip(plain, ours, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


def _refusal_of_unused():
    with pytest.raises(RuntimeError) as refusal:
        _sometimes_unused(HIERARCHY_ONLY, left_out=True)
    return str(refusal.value)


def test_where_fsdp2_leaves_unused_parameters_out_every_rank_refuses_them():
    for message in run_ranks(4, _refusal_of_unused):
        assert "some trainable parameters of the root module got no gradient in this backward pass" in message
        assert "requires_grad = False" in message and "set_reduce_scatter_unused_params(True)" in message


def _refusals():
    messages = []
    for build in (
        _without_fsdp,
        _hsdp,
        _hsdp_with_a_hook,
        _post_forward_mesh,
        _mixed_dtypes,
        _sharded_root_later,
        _sharded_sibling_later,
        _other_collectives_later,
        _gathered_in_a_cuda_graph,
        _gathered_without_hpz_in_a_cuda_graph,
        _reduced_in_a_cuda_graph,
    ):
        try:
            build()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def _without_fsdp():
    apply_zeropp(nn.Linear(4, 4), ALL_FLAGS)


def _hsdp():
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    apply_zeropp(model, ALL_FLAGS)


def _hsdp_with_a_hook():
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    model.set_all_reduce_hook(lambda reduced: None)
    apply_zeropp(model, ZeroPPConfig())


def _post_forward_mesh():
    model = nn.Linear(4, 4)
    fully_shard(model, reshard_after_forward=2)
    apply_zeropp(model, ALL_FLAGS)


def _mixed_dtypes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False))
    fully_shard(model)
    apply_zeropp(model, ALL_FLAGS)
    model(torch.ones(1, 4))


def _with_a_sharded_part(config=ALL_FLAGS):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    apply_zeropp(model, config)
    return model


def _sharded_root_later():
    model = _with_a_sharded_part()
    fully_shard(model)
    model(torch.ones(1, 4))


def _sharded_sibling_later():
    model = _with_a_sharded_part()
    fully_shard(model[1])
    model(torch.ones(1, 4))


def _other_collectives_later():
    model = _with_a_sharded_part()
    model(torch.ones(1, 4))
    other = _with_a_sharded_part()
    model[0].set_custom_all_gather(other[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm)
    model(torch.ones(1, 4))


@contextmanager
def _capturing():
    """What cannot run here: a GPU, and a capture on it."""
    with (
        patch.object(FSDPUnit, "device", property(lambda _: torch.device("cuda"))),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        yield


def _gathered_in_a_cuda_graph(config=ALL_FLAGS):
    model = _with_a_sharded_part(config)
    with _capturing():
        model(torch.ones(1, 4))


def _gathered_without_hpz_in_a_cuda_graph():
    _gathered_in_a_cuda_graph(ZeroPPConfig(quantized_weights=True))


def _reduced_in_a_cuda_graph():
    model = nn.Linear(4, 4)
    fully_shard(model)
    apply_zeropp(model, ALL_FLAGS)
    loss = model(torch.ones(1, 4)).sum()  # the root stays whole for its backward pass
    with _capturing():
        loss.backward()


def test_what_is_not_supported_is_refused_by_name():
    no_units, hsdp, hook, post_forward, dtypes, root, sibling, collectives, *graphs = run_ranks(4, _refusals)[0]
    assert "call torch.distributed.fsdp.fully_shard on it first" in no_units
    assert "HSDP" in hsdp
    assert "has an all-reduce hook already" in hook
    assert "reshard_after_forward=<int>" in post_forward
    assert "different dtypes" in dtypes
    assert "fully_shard was called on the root module after apply_zeropp" in root
    assert "fully_shard was called on 1 after apply_zeropp" in sibling
    assert "the collectives of 0 were replaced" in collectives
    assert len(graphs) == 3 and all("cannot be gathered or reduced in a CUDA graph" in message for message in graphs)


def _traffic(config, num_micro_batches):
    model = nn.Linear(512, 512, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    zeropp = apply_zeropp(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        zeropp.traffic.take()
        for i in range(num_micro_batches):
            zeropp.set_is_last_micro_batch(i == num_micro_batches - 1)
            model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    return zeropp.traffic.inter_node


@pytest.mark.parametrize("num_micro_batches", [1, 8])
def test_bytes_between_nodes_are_those_of_one_gather_and_one_reduction(num_micro_batches):
    sent = run_ranks(4, _traffic, ALL_FLAGS, num_micro_batches)
    per_node_and_parameter = (sent[0] + sent[1]) / 512**2
    int8_and_int4_with_scales = (1 + 4 / 64) + (0.5 + 4 / 128)
    assert per_node_and_parameter == pytest.approx(int8_and_int4_with_scales / 2, rel=1e-3)  # (N - 1) / N


NOISE = dict(gradient_rounding="stochastic")
ELEMENT_SCALES = dict(gradient_element_scales=True)
INT8_STATE = dict(quantized_weights=True, hpz_secondary_dtype="int8", gradient_sum_dtype="int8")


def _state_round_trip():
    return [
        *(_continued_and_resumed(then, NOISE) for then in ("evaluate", "change", "nothing")),
        _continued_and_resumed("evaluate", INT8_STATE, num_micro_batches=2),
        _continued_and_resumed("evaluate", NOISE | ELEMENT_SCALES),
    ]


def _continued_and_resumed(then, options, num_micro_batches=1):
    """Train 4 steps; and train 2, evaluate or change the weights too, save, load into a new model, train 2."""

    def build():
        torch.manual_seed(1)
        model = nn.Linear(128, 96)
        fully_shard(model)
        config = ZeroPPConfig(
            hpz_partition_size=2,
            weight_difference_bits=4,
            quantized_gradients=True,
            loco=LoCoConfig(),
            gradient_bits=2,
            **options,
        )
        return model, apply_zeropp(model, config), torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(model, zeropp, optimizer, first):
        for step in range(first, first + 2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            for i in range(num_micro_batches):
                zeropp.set_is_last_micro_batch(i == num_micro_batches - 1)
                model(torch.randn(8, 128, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, zeropp, optimizer = build()
    steps(model, zeropp, optimizer, 0)
    if then != "nothing":
        with torch.no_grad():
            model(torch.ones(1, 128))  # gathers the new weights
        model.reshard()
    if then == "change":
        model.weight.data.mul_(3)
    state, names = copy.deepcopy(zeropp.state_dict()), sorted(own_state(zeropp))
    weights = copy.deepcopy({name: p.to_local().detach().clone() for name, p in model.named_parameters()})
    steps(model, zeropp, optimizer, 2)
    again, zeropp_again, optimizer_again = build()
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.to_local().copy_(weights[name])
    zeropp_again.load_state_dict(state)
    steps(again, zeropp_again, optimizer_again, 2)
    same = all(p.to_local().equal(q.to_local()) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    return same, names


def test_state_restores_errors_copies_and_noise_exactly():
    expected = [
        "gradients/root/inter.error",
        "gradients/root/inter.steps",
        "gradients/root/steps",
        "optimizer_steps",
        "weights/root/checksum",
        "weights/root/copies",
        "weights/root/has_copies",
        "weights/root/is_current",
        "weights/root/versions",
    ]
    for of_rank in run_ranks(4, _state_round_trip):
        assert [same for same, _ in of_rank] == [True] * 5
        assert [names for _, names in of_rank[:3]] == [expected] * 3
        assert of_rank[3][1] == sorted([*expected, "weights/root/copies_dtype"])
        scales = [f"gradients/root/element_scales.{key}" for key in ("exponents", "steps")]
        assert of_rank[4][1] == sorted([*expected, *scales])


def _undone_step():
    loco = LoCoConfig(hops="both", reset="decay", reset_interval=4)
    config = ZeroPPConfig(
        quantized_gradients=True, ranks_per_node=2, gradient_bits=2, gradient_element_scales=True, loco=loco
    )
    model = nn.Linear(128, 96)
    fully_shard(model)
    zeropp = apply_zeropp(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate():
        for is_last in (False, True):
            zeropp.set_is_last_micro_batch(is_last)
            model(torch.randn(8, 128)).square().sum().backward()

    accumulate()
    optimizer.step()
    before = {k: v.clone() for k, v in own_state(zeropp).items()}
    accumulate()
    moved = own_state(zeropp)
    zeropp.undo_step()
    after = own_state(zeropp)
    (reduce_scatter,) = zeropp._reduce_scatters.values()
    feedback = reduce_scatter.hops.feedback["inter"]
    errors = [feedback.decode(feedback.error)]
    zeropp.rescale_errors(0.5)
    errors.append(feedback.decode(feedback.error))
    return before, moved, after, errors


def test_an_undone_step_leaves_no_trace_and_rescaling_is_exact():
    for before, moved, after, (error, rescaled) in run_ranks(4, _undone_step):
        for hop in ("intra", "inter"):
            name = f"gradients/root/{hop}.error"
            assert before[name].any() and not moved[name].equal(before[name])
        name = "gradients/root/element_scales.exponents"
        assert before[name].any() and not moved[name].equal(before[name])
        assert all(before[name].equal(after[name]) for name in before)
        assert error.any() and rescaled.equal(error * 0.5)  # a power of 2 changes exponents alone


def _forgiving():
    """What is left of an Inf in one step, of micro-batches that were dropped, and of an undo after a good step."""
    model = nn.Linear(64, 64)
    fully_shard(model)
    zeropp = apply_zeropp(model, ALL_FLAGS)
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
    other.step()  # of another model
    message, stepped = "", []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    zeropp.undo_step()
    optimizer.step()
    return after_inf, untouched, dropped, message, stepped


def test_an_inf_passes_and_dropped_gradients_are_gone():
    after_inf, untouched, dropped, message, stepped = run_ranks(4, _forgiving)[0]
    torch.testing.assert_close(after_inf, torch.full((64,), 8.0), rtol=1e-2, atol=0)
    assert untouched
    torch.testing.assert_close(dropped, torch.full((64,), 8.0), rtol=1e-2, atol=0)
    assert "had not crossed nodes" in message and stepped == [True]  # after undo_step


def _changes_are_seen_alike():
    """Whether the unit's parameters count as changed, after each of what programs do to models."""
    model = nn.Linear(20000, 5)  # uneven: the last ranks' shards are padding or empty
    fully_shard(model)
    unit = apply_zeropp(model, ALL_FLAGS).units[0]
    other = nn.Linear(2, 2)
    seen = []
    for _ in range(3):
        model.to(torch.float64)
        model.to(torch.float32)
        seen.append(bool(unit.changed()))
        unit.mark_gathered()
    if dist.get_rank() == 0:
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # an optimizer that only one rank has, of another model
    seen.append(bool(unit.changed()))
    torch.optim.AdamW(model.parameters(), fused=True).step()
    seen.append(bool(unit.changed()))
    return seen


def test_all_ranks_see_changes_alike():
    results = run_ranks(4, _changes_are_seen_alike)
    assert all(seen == results[0] for seen in results)
    assert results[0][-2:] == [False, True]


def _inference_then_training():
    model = nn.Linear(64, 64)
    fully_shard(model)
    apply_zeropp(model, ZeroPPConfig(hpz_partition_size=2, weight_difference_bits=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):  # FSDP2 itself wants to train before it infers
        loss = model(torch.ones(1, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
        with torch.inference_mode():
            model(torch.ones(1, 64))
        model.reshard()
    return losses


def test_inference_mode_does_not_freeze_the_copies():
    losses = run_ranks(4, _inference_then_training)[0]
    assert losses[2] < losses[1] < losses[0]


def _state_of_another_config():
    model = nn.Linear(64, 64)
    fully_shard(model)
    zeropp = apply_zeropp(model, ALL_FLAGS)
    model(torch.randn(2, 64)).sum().backward()
    state = zeropp.state_dict()
    others = (
        replace(ALL_FLAGS, seed=7),
        replace(ALL_FLAGS, gradient_sum_dtype="int8", offload_gradient_sums=True, loco=LoCoConfig(exact_undo=False)),
        replace(ALL_FLAGS, **ELEMENT_SCALES),
        replace(ALL_FLAGS, loco=LoCoConfig(beta=0.5)),
    )
    taken_over = []
    for config in others:
        other = nn.Linear(64, 64)
        fully_shard(other)
        another = apply_zeropp(other, config)
        with CapturedWarnings() as warnings:
            another.load_state_dict(state)
        loaded = another.state_dict()
        same = all(name in loaded and value.equal(loaded[name]) for name, value in state.items())
        taken_over.append((same, ["another ZeroPPConfig" in message for message in warnings.messages]))
    return taken_over


def test_state_of_another_config_is_left_out_but_not_where_it_keeps_the_same():
    assert run_ranks(4, _state_of_another_config)[0] == [(True, [])] * 2 + [(False, [True])] * 2


def _bytes_on_one_node():
    sent = []
    for config in (ZeroPPConfig(True, 4, weight_difference_bits=4), ZeroPPConfig(True, 4), ZeroPPConfig()):
        model = nn.Linear(256, 256)
        fully_shard(model)
        zeropp = apply_zeropp(model, config)
        model(torch.ones(1, 256)).sum().backward()
        sent.append(zeropp.traffic.take().intra_node)
    return sent


def test_weights_travel_in_full_but_quantized_where_there_is_one_node():
    differences, quantized, plain = run_ranks(4, _bytes_on_one_node)[0]
    assert differences == quantized < plain
