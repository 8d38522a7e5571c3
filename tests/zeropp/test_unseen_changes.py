"""Weights that a program changed by means that leave no trace are never stale: the oracle is plain FSDP2."""

import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.gather.changed_weights import same_bits
from tests.collectives import Collectives
from tests.ranks import run_in_turn
from tests.zeropp import training_on_ranks as on_ranks

HPZ = ZeroPPConfig(hpz_partition_size=2)  # exact
MOVES = ZeroPPConfig(hpz_partition_size=2, weight_moves=True)
X = torch.linspace(-1, 1, 2 * 12).view(2, 12)


class Net(on_ranks.Net):
    """Two blocks on all ranks, one on pairs, and a head that belongs to the root; odd sizes and empty shards."""

    def __init__(self) -> None:
        super().__init__(width=12, hidden=17, outputs=3)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def shard(model, config, reshard=True, dtype=None, root=True):
    everyone = init_device_mesh("cpu", (4,))
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))["rank"]
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for i, block in enumerate(model.blocks):
        fully_shard(block, mesh=pair if i == 2 else everyone, reshard_after_forward=reshard, mp_policy=policy)
    if root:
        fully_shard(model, mesh=everyone, reshard_after_forward=reshard, mp_policy=policy)
    return apply_zeropp(model, config) if config is not None else None


def build(config, **options):
    model = Net()
    zeropp = shard(model, config, **options)
    return model, zeropp, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer):
    on_ranks.step(model, optimizer, X + dist.get_rank())


@torch.no_grad()
def evaluate(model, **arguments):
    """The outputs; what was gathered for them stays."""
    return model(X, **arguments).clone()


@torch.no_grad()
def foreach(model):
    torch._foreach_mul_(list(model.parameters()), 1.5)


def data(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


@torch.no_grad()
def local(model):
    for parameter in model.parameters():
        parameter.to_local().copy_(parameter.to_local() * 1.5)


def one_rank(model):
    if dist.get_rank() == 3:
        model.blocks[1][0].weight.to_local().data[0, 5] += 1e-3


@torch.no_grad()
def counted_on_one_rank(model):
    """Autograd counts it, on this rank alone."""
    if dist.get_rank() == 1:
        model.blocks[0][0].weight.to_local().mul_(1.5)
        model.blocks[0][0].weight.add_(0)  # writes to the shard: nothing is sent


def in_place_load(model):
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    other = Net()
    with torch.no_grad():
        torch._foreach_mul_(list(other.parameters()), 2.0)
    shard(other, None)
    dcp.save({"model": other.state_dict()}, checkpoint_id=folders[0])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folders[0])


CHANGES = (foreach, data, local, one_rank, counted_on_one_rank, in_place_load)


def after_each_change(config, **options):
    """Outputs after a step, then of evaluations after each change, of one after a step, and with gradients on."""
    model, _, optimizer = build(config, **options)
    step(model, optimizer)
    outputs = [evaluate(model)]
    for change in CHANGES:
        change(model)
        outputs.append(evaluate(model))
    step(model, optimizer)
    outputs.append(evaluate(model))
    data(model)
    outputs.append(model(X).detach().clone())
    foreach(model)
    outputs.append(model(X).detach().clone())  # no backward pass in between
    return outputs


def swapped(config, reshard=True):
    """Averaged weights in, evaluate twice, weights out, train on; as training loops do."""
    model, _, optimizer = build(config, reshard=reshard)
    average, outputs = [p.detach().clone() for p in model.parameters()], []
    for i in range(2):
        step(model, optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.5)
        if i == 1:
            outputs.append(evaluate(model))  # gathers before the swap
            on_ranks.reshard(model)
        kept = [p.detach().clone() for p in model.parameters()]
        for parameter, value in zip(model.parameters(), average, strict=True):
            parameter.data.copy_(value)
        with torch.inference_mode():
            outputs += [model(X).clone(), model(X).clone()]
        on_ranks.reshard(model)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
    return [*outputs, evaluate(model)]


def parts(config):
    """Passes that use other parts of the model, without an FSDP2 root, and gathers by hand."""
    model, *_ = build(config, root=False)
    outputs = [evaluate(model)]
    for block in (0, 1, 2, 0):
        data(model)
        outputs.append(evaluate(model, order=[block]))
    for _ in range(2):
        data(model.blocks)
        model.blocks[1].unshard()
        outputs.append(evaluate(model, order=[1]))
    return outputs


def skipped(config):
    """Passes that skip a block whose weights have left already, and an optimizer's step before the next pass."""
    model, _, optimizer = build(config, dtype=torch.bfloat16)
    model(X + dist.get_rank()).square().mean().backward()
    outputs = []
    for _ in range(2):
        optimizer.step()
        outputs.append(evaluate(model, order=[0, 2]))
        optimizer.step()
        outputs.append(evaluate(model))
    return outputs


def by_a_method(config):
    """Passes of a method of the model's own: FSDP2 runs its hooks then, and nn.Module none."""
    model, _, optimizer = build(config)
    register_fsdp_forward_method(model, "predict")
    step(model, optimizer)
    outputs = []
    for _ in range(3):
        with torch.no_grad():
            outputs.append(model.predict(X).clone())
        data(model)
    return outputs


def after_an_exception(config):
    model, *_ = build(config)
    outputs = [evaluate(model)]
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(model)
    handle.remove()
    on_ranks.reshard(model)
    data(model)
    return [*outputs, evaluate(model)]


def while_accumulating(config):
    """An evaluation with other weights between two micro-batches of a step, and the next step's micro-batches."""
    model, zeropp, optimizer = build(config)
    outputs = []
    for _ in range(2):
        for _ in on_ranks.micro_batches(zeropp, 2):
            loss = model(X).square().mean()
            loss.backward()
            data(model)  # the evaluation ends what a micro-batch knows of the one before
            outputs += [loss.detach(), evaluate(model)]
        optimizer.step()
        optimizer.zero_grad()
        data(model)
    return outputs


class AtHome:
    """An optimizer of a program's own, which writes where autograd does not count."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        local = [parameter.to_local().data for parameter in self.parameters]
        torch._foreach_sub_(local, [parameter.grad.to_local() for parameter in self.parameters], alpha=0.1)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


OPTIMIZERS = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "at home": AtHome,
}


def trained(config):
    """Losses under each optimizer; parameters are merged with others and taken apart again between two steps."""
    losses = []
    for make in OPTIMIZERS.values():
        model, *_ = build(config)
        optimizer = make(model.parameters())
        model.blocks[1].requires_grad_(False)
        for parameter in model.blocks[1].parameters():
            parameter.grad = torch.zeros_like(parameter)
        for factor in (1.0, 1.5, 1 / 1.5, 1.0):
            for parameter in model.blocks[1].parameters():
                parameter.data.mul_(factor)  # as LoRA's merge does
            model(X).square().mean().backward()
            losses.append(model(X).detach().sum())
            optimizer.step()
    return losses


def _asked():
    """Return, for each way to come to a forward pass, the units that ranks ask about in it, and what the host reads."""
    asked = {}
    for is_quantized in (False, True):
        model, zeropp, _ = build(replace(HPZ, quantized_gradients=is_quantized))
        fused, at_home = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), AtHome(model.parameters())

        def count(name, model=model, is_quantized=is_quantized):
            with Collectives() as collectives:
                loss = model(X).square().mean()
            started = [each.name for each in collectives.started]
            asked[name, is_quantized] = started.count("allreduce_"), len(collectives.reads)
            return loss

        for optimizer, name in ((fused, "first"), (fused, "a step"), (at_home, "a step again"), (fused, "at home")):
            count(name).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(X)
            on_ranks.reshard(model)
            count("evaluation")
            on_ranks.reshard(model)
        for name, is_last in (("a micro-batch", False), ("a further one", True)):
            zeropp.set_is_last_micro_batch(is_last)
            count(name).backward()
        zeropp.undo_step()
        fused.zero_grad()
        model.blocks[0].requires_grad_(False)
        count("undone").backward()
    return asked


CASES = {
    "optimizers": (trained, {}),
    "changes": (after_each_change, {}),
    "swap": (swapped, {}),
    "swap, kept after forward": (swapped, {"reshard": False}),
    "parts": (parts, {}),
    "method": (by_a_method, {}),
    "exception": (after_an_exception, {}),
    "accumulation": (while_accumulating, {}),
}


def _cases():
    results = {name: (run(None, **options), run(HPZ, **options)) for name, (run, options) in CASES.items()}
    results["skipped"] = skipped(None), skipped(MOVES)
    model, *_ = build(MOVES, dtype=torch.bfloat16)
    plain, *_ = build(None, dtype=torch.bfloat16)
    results["moved bits"] = [], []
    evaluate(model)
    for change in CHANGES:
        for of_model, outputs in zip((plain, model), results["moved bits"], strict=True):
            change(of_model)
            outputs.append(evaluate(of_model))
    return results


@pytest.fixture(scope="module")
def found():
    return run_in_turn(4, {"cases": _cases, "asked": _asked}, timeout=400.0)


def test_training_steps_ask_nothing_and_all_else_asks_once(found):
    """In one all-reduce of the units that cross nodes, whose result the host reads."""
    looks = {"evaluation", "a micro-batch", "undone"}
    for asked in found["asked"]:
        for (name, is_quantized), counted in asked.items():
            is_look = name in looks or (name == "at home" and not is_quantized)
            assert counted == ((1, 1) if is_look else (0, 0)), (name, is_quantized)


@pytest.mark.parametrize("name", [*CASES, "moved bits", "skipped"])
def test_changed_weights_are_those_of_plain_fsdp2(found, name):
    for of_rank in found["cases"]:
        plain, ours = of_rank[name]
        assert len({output.sum().item() for output in plain}) > 1  # the changes make a difference
        assert [i for i, (p, q) in enumerate(zip(plain, ours, strict=True)) if not p.equal(q)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel, offset", [(1, 0), (3, 1), (64, 0), (1001, 3)])
def test_a_comparison_sees_every_bit(dtype, numel, offset):
    sent = torch.randint(256, ((numel + offset) * dtype.itemsize,), dtype=torch.uint8).view(dtype)[offset:]  # NaNs, too
    assert same_bits(sent, sent.clone())
    for i in torch.randperm(numel)[:20].tolist():
        other = sent.clone()
        other.view(torch.uint8)[i * dtype.itemsize] ^= 1
        assert not same_bits(other, sent)
