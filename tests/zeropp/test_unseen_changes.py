"""Weights that a program changed by means that leave no trace are never stale: the oracle is plain FSDP2."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
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


def in_place_load(model):
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    other = Net()
    with torch.no_grad():
        torch._foreach_mul_(list(other.parameters()), 2.0)
    shard(other, None)
    dcp.save({"model": other.state_dict()}, checkpoint_id=folders[0])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folders[0])


CHANGES = (foreach, data, local, one_rank, in_place_load)


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
    """An evaluation with other weights between two micro-batches of a step, and those of the step after it."""
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


CASES = {
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
    return run_in_turn(4, {"cases": _cases}, timeout=400.0)


@pytest.mark.parametrize("name", [*CASES, "moved bits", "skipped"])
def test_changed_weights_are_those_of_plain_fsdp2(found, name):
    for of_rank in found["cases"]:
        plain, ours = of_rank[name]
        assert len({output.sum().item() for output in plain}) > 1  # the changes make a difference
        assert [i for i, (p, q) in enumerate(zip(plain, ours, strict=True)) if not p.equal(q)] == []
