"""One process against real gloo ranks: losses, weights and traffic of training are equal, to the last bit in fp32."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.models.init import init_weights
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, emulate_zeropp
from tests.families.find import architecture_of
from tests.models.configs import gpt_config, llama_config
from tests.ranks import run_ranks
from tests.zeropp.fsdp_model import HAS_UNUSED_SWITCH, CapturedWarnings
from tests.zeropp.training_on_ranks import TiedNet as Net
from tests.zeropp.training_on_ranks import Trained, backward, equal, micro_batches, shard, token_batch, train

ALL = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=2,
    quantized_gradients=True,
    weight_block_size=64,
    gradient_block_size=32,
)
LOCO = replace(ALL, loco=LoCoConfig())
CASES = {
    # name: (model, config, dtype)
    "bits that warm up": ("net", replace(LOCO, gradient_bits=2, gradient_bits_warmup="2:4"), None),
    "LoCo on both hops, no blocks": (
        "net",
        replace(
            ALL,
            weight_block_size=None,
            gradient_block_size=None,
            loco=LoCoConfig(hops="both", error_dtype="bf16", reset_interval=2),
        ),
        None,
    ),
    "noise": (
        "net",
        replace(
            ALL,
            weight_intra_bits=6,
            hadamard=True,
            weight_rounding="stochastic",
            gradient_rounding="stochastic",
            loco=LoCoConfig(reset="decay", reset_interval=4),
        ),
        None,
    ),
    "int8 copies, bf16 sums": (
        "net",
        replace(ALL, hpz_secondary_dtype="int8", gradient_sum_dtype="bf16", gradient_bits=None),
        None,
    ),
    "int8 copies, int8 sums": (
        "net",
        replace(ALL, hpz_secondary_dtype="int8", gradient_sum_dtype="int8", loco=LoCoConfig(exact_undo=False)),
        torch.bfloat16,
    ),
    "moved codes": ("net", replace(LOCO, weight_moves=True, weight_bits=6, gradient_intra_bits=None), None),
    "moved bits, scales of elements": (
        "net",
        replace(LOCO, quantized_weights=False, weight_moves=True, gradient_bits=2, gradient_element_scales=True),
        torch.bfloat16,
    ),
    "1 bit, scales of elements": (
        "net",
        replace(LOCO, gradient_bits=1, gradient_bits_warmup="1:4", gradient_element_scales=True, scale_dtype="bf16"),
        None,
    ),
    "frozen bf16 weights in NF4, moved codes": (
        "net on a bf16 base",
        replace(LOCO, frozen_dtype="nf4", nf4_skip=("layers.2",), weight_moves=True),
        torch.bfloat16,
    ),
    "GPT in bf16": ("gpt", LOCO, torch.bfloat16),
    "Llama in fp16": ("llama", LOCO, torch.float16),
    "qwZ alone": ("gpt", ZeroPPConfig(quantized_weights=True, ranks_per_node=2, weight_rounding="stochastic"), None),
    "hpZ alone": ("net", ZeroPPConfig(hpz_partition_size=2), None),
    "ZeRO-3": ("net", ZeroPPConfig(ranks_per_node=2), None),
}
CONFIGS = {
    "gpt": gpt_config(1, 36, 2, vocab_size=50, max_position_embeddings=16, attention_dropout=0.1, hidden_dropout=0.1),
    "llama": llama_config(1, 36, 2, vocab_size=50),
}
UNQUANTIZED_GRADIENTS = ("qwZ alone", "hpZ alone", "ZeRO-3")


def build(kind: str) -> nn.Module:
    if kind.startswith("net"):
        net = Net(dropout=0.1)
        for parameter in net.parameters() if "bf16 base" in kind else ():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
        return net
    config = CONFIGS[kind]
    model = architecture_of(config).module(config)
    init_weights(model, seed=1)
    return model


def policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is torch.bfloat16 else None)


def trained(model: nn.Module, zeropp) -> tuple[Trained, list[torch.Tensor]]:
    """Three steps of two micro-batches, and outputs of two evaluations after the second step.

    Before the second evaluation parameters are changed behind autograd's back; not those of the root, which FSDP2 keeps
    after an evaluation.
    """
    outputs = []

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for is_changed in (False, True) if step == 1 else ():
            for parameter in model.layers.parameters() if is_changed else ():
                parameter.data.mul_(1.25)
            for as_rank in zeropp.ranks:
                with as_rank:
                    output = model.eval()(*token_batch(9, 9, 9)).clone()
            outputs.append(output)
        model.train()

    def loss_of(*batch: int) -> torch.Tensor:
        return model(*token_batch(*batch)).mean() / 2

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)
    if len(zeropp.ranks) > 1:
        zeropp.ranks.step_by_shards(optimizer)
    return train(model, zeropp, loss_of, 3, 2, optimizer, evaluate), outputs


def on_real_ranks(kind, config, dtype):
    model = build(kind)
    zeropp = shard(model, config, model.layers, mp_policy=policy(dtype))
    if not config.quantized_gradients and kind == "net" and HAS_UNUSED_SWITCH:
        model.set_reduce_scatter_unused_params(True)
    torch.manual_seed(100 + dist.get_rank())
    return trained(model, zeropp)


def emulated(kind, config, dtype, num_nodes, ranks_per_node):
    model, mp = build(kind), policy(dtype)
    units, dtypes = list(model.layers), dict(param_dtype=mp.param_dtype, reduce_dtype=mp.reduce_dtype)
    zeropp = emulate_zeropp(model, config, num_nodes, ranks_per_node, units=units, **dtypes)
    zeropp.ranks.random_states.seed(lambda rank: 100 + rank)
    return trained(model, zeropp)


def _on_real_ranks(names):
    return {name: on_real_ranks(*CASES[name]) for name in names}


def both(names, num_nodes):
    """Return for each case what each real rank returned, and the emulation of all, on nodes of 2 ranks."""
    real = run_ranks(2 * num_nodes, _on_real_ranks, names, timeout=400.0)
    return {name: ([of_rank[name] for of_rank in real], emulated(*CASES[name], num_nodes, 2)) for name in names}


@pytest.fixture(scope="module")
def on_four_ranks():
    return both(list(CASES), num_nodes=2)


def check_traffic(real, emulation):
    for of_all, *of_ranks in zip(emulation[0].traffic, *(trained.traffic for trained, _ in real), strict=True):
        assert of_all.inter_node == sum(of_rank.inter_node for of_rank in of_ranks)
        assert of_all.intra_node == sum(of_rank.intra_node for of_rank in of_ranks)


def check_equal(real, emulation):
    trained, outputs = emulation
    for rank, (of_rank, _) in enumerate(real):
        assert trained.losses[rank :: len(real)] == of_rank.losses
    assert equal(outputs, real[0][1]) and len(outputs) == 2
    assert equal(trained.weights, real[0][0].weights)
    check_traffic(real, emulation)


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNQUANTIZED_GRADIENTS])
def test_equals_real_ranks_to_the_bit(on_four_ranks, name):
    check_equal(*on_four_ranks[name])


def test_equals_six_ranks_on_three_nodes():
    check_equal(*both(["noise"], num_nodes=3)["noise"])


@pytest.mark.parametrize("name", UNQUANTIZED_GRADIENTS)
def test_unquantized_gradients_differ_by_the_order_of_sums_alone(on_four_ranks, name):
    real, emulation = on_four_ranks[name]
    for rank, (of_rank, _) in enumerate(real):
        losses = emulation[0].losses[rank :: len(real)]
        assert losses[:2] == of_rank.losses[:2]  # before the first step nothing was summed
        assert losses == pytest.approx(of_rank.losses, rel=1e-6)
    for mine, theirs in zip(emulation[0].weights, real[0][0].weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    check_traffic(real, emulation)


def states_of_step_1(loco: LoCoConfig, before: Sequence[int], undo: Callable, num_micro_batches: int = 1):
    """LoCo's state and the gradients of step 1, after these steps: 0 is taken, and ``undo`` runs and undoes step 8."""
    model = Net().eval()
    config = replace(ALL, loco=loco, gradient_element_scales=loco.exact_undo)
    zeropp = emulate_zeropp(model, config, 2, 2, units=list(model.layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(*batch: int) -> torch.Tensor:
        return model(*token_batch(*batch)).mean()

    for step in before:
        if step == 8:
            undo(zeropp, loss_of)
        else:
            backward(zeropp, loss_of, step, num_micro_batches)
            optimizer.step()
            if not loco.exact_undo:
                zeropp.undo_step()  # too late: the optimizer has used what the errors went with
                assert any(name.endswith(".error") for name in zeropp.state_dict())
        model.zero_grad()
    backward(zeropp, loss_of, 1, num_micro_batches)
    return zeropp.state_dict() | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("every_rank", [True, False])
@pytest.mark.parametrize(
    "loco, num_micro_batches, hops",
    [
        (LoCoConfig(), 1, ["inter"]),
        (LoCoConfig(hops="both", reset_interval=3), 2, ["inter", "intra"]),  # an undone step counts for no reset
    ],
)
def test_an_undone_step_leaves_no_trace(every_rank, loco, num_micro_batches, hops):
    def undo(zeropp, loss_of):
        for i in micro_batches(zeropp, num_micro_batches):
            for rank, as_rank in enumerate(zeropp.ranks):
                if i == num_micro_batches - 1 and rank == 3 and not every_rank:
                    break
                with as_rank:
                    loss_of(8, i, rank).backward()
        zeropp.undo_step()

    expected, state = (states_of_step_1(loco, before, undo, num_micro_batches) for before in ((0,), (0, 8)))
    assert sorted({key.split("/")[-1][:5] for key in state if key.endswith(".error")}) == hops
    assert any("weight" in name for name in state)
    assert state.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in state.items())


def test_without_a_copy_an_undone_step_lets_loco_begin_anew():
    def undo(zeropp, loss_of):
        backward(zeropp, lambda *batch: 1e30 * loss_of(*batch), 8)
        zeropp.undo_step()

    loco = LoCoConfig(exact_undo=False)
    expected, state = (states_of_step_1(loco, before, undo) for before in ((), (0, 8)))
    assert state.keys() == expected.keys() and any(name.endswith(".error") for name in state)
    assert all(value.equal(expected[name]) for name, value in state.items())


def _two_layers(frozen: int | None, learning_rate: float = 0.0, fused: bool = False):
    """Two equal layers with LoCo and scales of elements, of which one may be frozen; and a step of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    zeropp = emulate_zeropp(model, replace(LOCO, gradient_element_scales=True), 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(factor: float = 1.0, undo: bool = False) -> None:
        for rank, as_rank in enumerate(zeropp.ranks):
            with as_rank:
                loss = model(token_batch(0, 0, rank)[0].float().repeat(1, 8)[:, :64]).square().mean()
                scaler.scale(factor * loss).backward()
        scale = scaler.get_scale()
        if not undo:
            scaler.step(optimizer)
            scaler.update()
        if undo or scaler.get_scale() < scale:
            zeropp.undo_step()
        optimizer.zero_grad()

    return model, zeropp, step


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skipped_can_be_undone(fused):
    """A fused optimizer is called, and does nothing on the device."""
    model, zeropp, step = _two_layers(None, 1e-3, fused)
    step()
    step()
    before = {name: value.clone() for name, value in zeropp.state_dict().items()}
    weight = model[0].weight.detach().clone()
    step(factor=1e38)
    assert weight.equal(model[0].weight)
    after = zeropp.state_dict()
    assert after.keys() == before.keys() and all(after[name].equal(before[name]) for name in before)
    step()
    assert not weight.equal(model[0].weight)


def test_errors_of_frozen_parameters_do_not_come_back_with_an_undone_step():
    def error_of(zeropp):
        return next(value for name, value in zeropp.state_dict().items() if name.endswith("inter.error"))

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
        assert error_of(zeropp).any() and error_of(zeropp).equal(error_of(fresh))


def test_state_of_other_trainable_parameters_is_left_out():
    _, zeropp, step = _two_layers(1)
    step()
    for frozen, warnings_expected in ((1, 0), (0, 1), (None, 1)):
        _, other, other_step = _two_layers(frozen)
        with CapturedWarnings() as warnings:
            other.load_state_dict(zeropp.state_dict())
        assert ["other frozen" in message for message in warnings.messages] == [True] * warnings_expected
        other_step()


def test_wrong_use_is_refused():
    model = build("net")
    with pytest.raises(ValueError, match="hpz_partition_size 2 must be"):
        emulate_zeropp(model, LOCO, 2, 4)
    with pytest.raises(ValueError, match="not stage 1"):
        emulate_zeropp(model, LOCO, 2, 2, zero_stage=1)
    with pytest.raises(ValueError, match="has no storage yet"):
        emulate_zeropp(nn.Linear(4, 4, device="meta"), LOCO, 2, 2)
    with pytest.raises(ValueError, match="shares a parameter with another unit"):
        emulate_zeropp(model, LOCO, 2, 2, units=[model.embedding])
    emulated = emulate_zeropp(model, LOCO, 2, 2, units=list(model.layers))
    with pytest.raises(RuntimeError, match="in turn: this is rank 1, it is rank 0's"), list(emulated.ranks)[1]:
        model(*token_batch(0, 0, 1)).mean().backward()
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    other = emulate_zeropp(build("net"), CASES["noise"][1], 2, 2)
    with CapturedWarnings() as warnings:
        emulated.load_state_dict(other.state_dict())
    assert ["another ZeroPPConfig" in message for message in warnings.messages] == [True]


def test_settings_without_effect_are_named(caplog):
    model = nn.Sequential(nn.Linear(8, 8))
    emulate_zeropp(model, ZeroPPConfig(True, 4, True, LoCoConfig()), num_nodes=1, ranks_per_node=4)
    assert "hpZ has no effect" in caplog.text and "LoCo has no effect" in caplog.text
    caplog.clear()
    emulate_zeropp(model, ZeroPPConfig(quantized_gradients=True, loco=LoCoConfig(hops="both")), 1, 4)
    assert "LoCo" not in caplog.text  # it corrects the hop within the node
    assert "matrices of the root module are sent unquantized: a rank holds fewer than 32 elements" in caplog.text
    caplog.clear()
    emulate_zeropp(nn.Linear(32, 32), ZeroPPConfig(quantized_gradients=True, gradient_intra_bits=None), 1, 4)
    assert "qgZ has no effect on 4 data-parallel ranks on one node" in caplog.text and "matrices" not in caplog.text
    for config in (ZeroPPConfig(True), ZeroPPConfig(quantized_gradients=True)):
        caplog.clear()
        emulate_zeropp(model, config, 2, 2)
        assert "matrices of the root module are sent unquantized" in caplog.text
    caplog.clear()
    emulate_zeropp(model, ZeroPPConfig(False, 2), 2, 2)
    assert "matrices" not in caplog.text


def draws_of(emulated):
    numbers = []
    for as_rank in emulated.ranks:
        with as_rank:
            numbers.append(torch.rand(3).tolist())
    return numbers


def test_random_states_are_loaded_into_ranks_that_were_never_seeded():
    ours, theirs = (emulate_zeropp(nn.Sequential(nn.Linear(8, 8)), ZeroPPConfig(), 2, 2) for _ in range(2))
    unseeded = ours.ranks.random_states.state_dict()
    ours.ranks.random_states.seed(lambda rank: 100 + rank)
    draws_of(ours)
    state = ours.ranks.random_states.state_dict()
    theirs.ranks.random_states.load_state_dict(state)
    expected = draws_of(ours)
    assert draws_of(theirs) == expected and len({tuple(numbers) for numbers in expected}) == 4
    theirs.ranks.random_states.load_state_dict(unseeded)  # one for all ranks again, the process's own
    torch.manual_seed(5)
    own = torch.rand(4, 3).tolist()
    torch.manual_seed(5)
    assert draws_of(theirs) == own


def test_random_states_of_too_few_ranks_are_refused():
    states = [emulate_zeropp(nn.Linear(8, 8), ZeroPPConfig(), 1, n).ranks.random_states for n in (2, 4)]
    states[0].seed(lambda rank: rank)
    with pytest.raises(KeyError, match=r"2\.cpu"):
        states[1].load_state_dict(states[0].state_dict())
