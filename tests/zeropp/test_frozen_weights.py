"""Frozen weights cross nodes once, and again when a program changes them; what arrives is as if all had crossed.

The oracles: plain FSDP2, and the same parameters in units of their own.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.ranks import run_in_turn, run_ranks
from tests.zeropp import training_on_ranks as on_ranks
from tests.zeropp.training_on_ranks import ALL_FLAGS, equal, evaluate, resumes_exactly, shard

HPZ = ZeroPPConfig(hpz_partition_size=2)  # exact
CONFIGS = {
    "all flags": ALL_FLAGS,
    "4 bits": replace(ALL_FLAGS, weight_bits=4, weight_intra_bits=8),
    "int4 copies": replace(ALL_FLAGS, hpz_secondary_dtype="int8", weight_bits=4),
    "moves": replace(ALL_FLAGS, weight_moves=True),
    "NF4": replace(ALL_FLAGS, frozen_dtype="nf4"),
    "NF4 and moves": replace(ALL_FLAGS, frozen_dtype="nf4", weight_moves=True),
}
X = torch.linspace(-1, 1, 3 * 20).view(3, 20)


class Adapted(nn.Module):
    """A frozen layer between two trained matrices and a trained bias, in the order of no one's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(20, 8, bias=False)
        self.base = nn.Linear(20, 20).requires_grad_(False)
        self.up = nn.Linear(8, 20)
        self.scale = nn.Parameter(torch.ones(20), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.base(x) + self.up(self.down(x))).tanh()


class Net(nn.Module):
    """Two adapted layers, one that is frozen, and a head that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Adapted(), nn.Linear(20, 20).requires_grad_(False), Adapted()])
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(config, apart=False):
    model, units = Net(), []
    for layer in model.layers:
        units += [layer.down, layer.base, layer.up] if apart and isinstance(layer, Adapted) else []
        units.append(layer)
    zeropp = shard(model, config, units)
    # As programs do that leave it to the gradients which parameters move.
    return model, zeropp, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)


def step(model, optimizer):
    return on_ranks.step(model, optimizer, X + dist.get_rank())


@torch.no_grad()
def counted(model):
    model.layers[0].base.weight.mul_(1.5)


def behind_autograd(model):
    model.layers[2].base.weight.data.mul_(1.5)


def on_one_rank(model):
    if dist.get_rank() == 2:
        model.layers[0].scale.to_local().data += 1e-3


def trained_ones(model):
    model.layers[2].up.bias.data.add_(0.5)


def unfreeze(model):
    model.layers[0].base.weight.requires_grad_(True)


def freeze(model):
    model.layers[0].base.weight.requires_grad_(False)
    model.layers[0].up.requires_grad_(False)


EVENTS = (counted, behind_autograd, on_one_rank, trained_ones, unfreeze, behind_autograd, freeze, counted)


def _events(config):
    """Losses, and outputs of evaluations, of steps with an event after each; every other event is evaluated first."""
    model, _, optimizer = build(config)
    results = []
    for i, event in enumerate(EVENTS):
        results.append(step(model, optimizer))
        event(model)  # the optimizer's step has not been gathered
        if i % 2:
            results.append(evaluate(model, X))
            event(model)  # it has
            results.append(evaluate(model, X))
    return [*results, step(model, optimizer), step(model, optimizer)]


def _events_with_and_without():
    return _events(None), _events(HPZ)


def test_whatever_changes_weights_are_those_of_plain_fsdp2(found):
    for plain, ours in found["events"]:
        assert [i for i, (p, q) in enumerate(zip(plain, ours, strict=True)) if not p.equal(q)] == []


def _in_units_of_their_own():
    results = {}
    for name, config in CONFIGS.items():
        for apart in (False, True):
            model, zeropp, optimizer = build(config, apart)
            losses, traffic = [], []
            for _ in range(3):
                losses.append(step(model, optimizer))
                traffic.append(zeropp.traffic.take().inter_node)
            results[name, apart] = [*losses, evaluate(model, X), step(model, optimizer)], traffic
    return results


@pytest.mark.long
def test_a_unit_of_both_kinds_is_as_units_of_one_kind():
    for of_rank in run_ranks(4, _in_units_of_their_own):
        for name in CONFIGS:
            (ours, traffic), (theirs, _) = of_rank[name, False], of_rank[name, True]
            assert [i for i, (p, q) in enumerate(zip(ours, theirs, strict=True)) if not p.equal(q)] == [], name
            assert len({loss.sum().item() for loss in ours}) == len(ours)
            assert max(traffic[1:3]) < traffic[0], name
            assert traffic[1] == traffic[2] or CONFIGS[name].weight_moves, name  # as many as moved


def _resumed(name, is_gathered):
    def train(model, zeropp, optimizer, part):
        for _ in range(2 + part):
            step(model, optimizer)

    def before_saving(model, zeropp):
        if is_gathered:
            evaluate(model, X)

    return resumes_exactly(lambda: build(CONFIGS[name]), train, before_saving)


def _resumes():
    return _resumed("all flags", is_gathered=False), _resumed("NF4 and moves", is_gathered=True)


def test_a_resumed_run_is_exact(found):
    assert found["resumes"] == [(True, True)] * 4


def _sent():
    """Bytes that this rank sends to other nodes, by step: with an event before the third."""
    sent = {}
    for event in (None, counted, behind_autograd):
        model, zeropp, optimizer = build(replace(ALL_FLAGS, loco=None, gradient_bits=None, gradient_intra_bits=None))
        sent[event] = []
        for i in range(4):
            if i == 2 and event is not None:
                event(model)
            step(model, optimizer)
            sent[event].append(zeropp.traffic.take().inter_node)
    return sent


def aligned(nbytes):
    return -(-nbytes // 16) * 16


def test_only_the_trained_weights_are_sent(found):
    # A rank's shard of a matrix: its elements in blocks of 32, and 4 bytes of each block's scale.
    adapters = 2 * (aligned(2 * 32) + aligned(2 * 4)) + aligned(5 * 4)  # 2 x 20, 5 x 8, and a bias of 5 in fp32
    head = aligned(2 * 32) + aligned(2 * 4) + aligned(2 * 4)
    frozen_layer = aligned(4 * 32) + aligned(4 * 4) + aligned(5 * 4)  # 5 x 20, and a bias
    # Unquantized ones side by side go as one: the bias of the frozen layer alone, the adapters' with the scale.
    whole = adapters + aligned(4 * 32) + aligned(4 * 4) + aligned((5 + 5) * 4)
    gradients = 2 * aligned((40 + 40 + 5) * 4) + aligned((40 + 2) * 4)
    trained = 2 * adapters + head + gradients
    first = 2 * whole + frozen_layer + head + gradients
    for rank, sent in enumerate(found["sent"]):
        # Units with frozen weights are looked at, in one all-reduce of 4 bytes each, by a ring over all ranks.
        looks = 3 * (4 - 1) * 2 if rank % 2 == 1 else 0
        assert sent[None] == [first, *[trained + looks] * 3]
        again = trained + looks + whole - adapters
        for event in (counted, behind_autograd):
            assert sent[event] == [first, trained + looks, again, trained + looks]


def _bytes_with_reference_passes(config, has_reference_passes):
    """Bytes between nodes of each of three steps; a reference pass freezes the adapters, as PEFT's disable_adapter."""
    model, zeropp, optimizer = build(config)
    adapters = [part for layer in model.layers if isinstance(layer, Adapted) for part in (layer.down, layer.up)]
    sent = []
    for _ in range(3):
        if has_reference_passes:
            for adapter in adapters:
                adapter.requires_grad_(False)
            with torch.no_grad():
                model(X)
            for adapter in adapters:
                adapter.requires_grad_(True)
        step(model, optimizer)
        sent.append(zeropp.traffic.take().inter_node)
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    return sent, weights


def _with_and_without(config):
    return [_bytes_with_reference_passes(config, has) for has in (False, True)]


@pytest.mark.parametrize("name", ["all flags", "NF4 and moves"])
def test_reference_passes_that_freeze_the_adapters_send_no_base_again(found, name):
    """DPO and GRPO with adapters: what was ever trained stays in the trained part."""
    (without, expected), (sent, weights) = found[name][0]
    assert sum(sent) <= 1.01 * sum(without) and sent[1:] == without[1:]
    assert equal(expected, weights)


def _rounded_outputs(model, in_nf4):
    """Outputs of a plain model with the weights of ``model``, where rows of these matrices, by rank, went as NF4."""
    plain = Net()
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for name in in_nf4:
        weight = plain.get_parameter(name).data
        rows = weight.view(dist.get_world_size(), -1)
        format = WireFormat([ParameterShard(name, rows.shape[1], True, is_nf4=True)], None, None, weight.dtype)
        weight.copy_(format.decode(format.encode(rows), torch.empty_like(rows)).view_as(weight))
    return plain(X).detach()


def _in_nf4():
    """Outputs, those that are expected, and those without any rounding, while weights freeze, unfreeze and change."""
    model, zeropp, optimizer = build(replace(HPZ, frozen_dtype="nf4", nf4_skip=("layers.1",)))
    first, last = "layers.0.base.weight", "layers.2.base.weight"
    # Weights that were ever trained stay out of NF4.
    events = ((None, (first, last)), (unfreeze, (last,)), (freeze, (last,)), (behind_autograd, (last,)))
    outputs = []
    for event, in_nf4 in events:
        if event is not None:
            event(model)
        step(model, optimizer)
        outputs.append((evaluate(model, X), _rounded_outputs(model, in_nf4), _rounded_outputs(model, ())))
    return outputs, zeropp.describe()


def test_frozen_matrices_arrive_in_nf4_and_all_else_as_it_is(found):
    for outputs, description in found["nf4"]:
        for arrived, expected, exact in outputs:
            assert arrived.equal(expected) and not arrived.equal(exact)
        assert ", frozen matrices in nf4; gradients" in description


def _fp32_adapters_on_a_bf16_base():
    """Losses, and dtypes of parameters, under plain FSDP2 and hpZ: PEFT makes adapters fp32 by default."""
    results = []
    for config in (None, HPZ):
        model = Net()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
        shard(model, config, model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = [step(model, optimizer) for _ in range(3)]
        results.append((losses, [parameter.dtype for parameter in model.parameters()]))
    return results


def test_a_unit_may_have_fp32_adapters_on_a_bf16_base(found):
    for (plain, dtypes), (ours, our_dtypes) in found["fp32 adapters"]:
        assert equal(plain, ours) and len(set(map(float, ours))) == 3
        assert dtypes == our_dtypes and set(dtypes) == {torch.float32, torch.bfloat16}


class Packed(nn.Module):
    """A frozen layer in 4 bits: two-dimensional storage of any 16 bits, NaNs with payloads too, typed as bf16.

    Stands in for bitsandbytes' Linear4bit with bnb_4bit_quant_storage=bfloat16, which keeps ``quant_state``, too.
    """

    def __init__(self) -> None:
        super().__init__()
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        self.weight = nn.Parameter(bits.view(torch.bfloat16).view(-1, 1), requires_grad=False)
        self.adapter = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.quant_state = "of the module"
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone().view(torch.int16).flatten())
        return x + self.adapter(x)


def _packed_as_it_arrives(configs):
    wrong = []
    for name, config in configs.items():
        torch.manual_seed(0)
        model = nn.Sequential(Packed(), nn.Linear(4, 4, dtype=torch.bfloat16))
        shard(model, config, [model[0]])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        wrong += [name for seen in model[0].seen if not seen.equal(expected)]
    return wrong


@pytest.fixture(scope="module")
def found():
    stochastic = replace(ALL_FLAGS, weight_rounding="stochastic")
    packed = partial(_packed_as_it_arrives, {"hpZ": HPZ, "stochastic": stochastic, **CONFIGS})
    reference_passes = {name: partial(_with_and_without, CONFIGS[name]) for name in ("all flags", "NF4 and moves")}
    functions = {"events": _events_with_and_without, "resumes": _resumes, "sent": _sent, "packed": packed}
    functions |= {"nf4": _in_nf4, "fp32 adapters": _fp32_adapters_on_a_bf16_base}
    return run_in_turn(4, functions | reference_passes)


def test_packed_codes_arrive_bit_by_bit(found):
    """bitsandbytes' 4-bit weights lost 98 % of their bytes: they were quantized as if they were numbers."""
    assert found["packed"][0] == []
