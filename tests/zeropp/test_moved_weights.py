"""Weights sent as moves of codes: with bf16's own bits training equals FSDP2's to the bit; nothing is ever behind."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
from megatron_zpp.zeropp.wire.moves import encode_moves
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import shard, step

LOSSLESS = ZeroPPConfig(hpz_partition_size=2, weight_moves=True)
INT6 = ZeroPPConfig(
    quantized_weights=True, hpz_partition_size=2, weight_moves=True, weight_bits=6, weight_block_size=64
)


def model_and_optimizer(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 48))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    zeropp = shard(model, config, [model[0]], mp_policy=policy)
    return model, zeropp, torch.optim.AdamW(model.parameters(), lr=3e-3)


def losses_and_bytes(config, steps):
    model, zeropp, optimizer = model_and_optimizer(config)
    losses, sent = [], []
    for i in range(steps):
        inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(zeropp.traffic.take().inter_node)
    return losses, sent


def test_moved_bits_train_as_fsdp2_does_to_the_bit(found):
    assert [losses for losses, _ in found["bits"]] == [losses for losses, _ in found["FSDP2"]]
    sent = found["bits"][0][1]  # FSDP2's ring sends no gradients of this rank between nodes: weights alone
    assert sum(sent) < 0.8 * len(sent) * sent[0]  # the first are sent in full


def weights_of_every_rank(config, change):
    """The weights that each rank computes with after ``change``, and the fp32 masters that they are of."""
    model, zeropp, optimizer = model_and_optimizer(config)
    for i in range(3):
        step(model, optimizer, torch.randn(4, 48, generator=torch.Generator().manual_seed(i)))
    change(model, optimizer)
    model(torch.ones(1, 48))
    seen = []
    for unit in zeropp.units:
        unit.module.unshard()
        seen += [parameter.detach().float().clone() for parameter in unit.module.parameters(recurse=True)]
        unit.module.reshard()
    masters = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return [tensor for tensor in seen if not hasattr(tensor, "full_tensor")], masters


def spike(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-100)  # an in-place write that nobody announces


def not_a_number(model, optimizer):
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
    optimizer.step()


def huge_step(model, optimizer):
    optimizer.param_groups[0]["lr"] = 10.0
    model(torch.ones(1, 48)).sum().backward()
    optimizer.step()


CHANGES = {
    f"{change.__name__}, {name}": partial(weights_of_every_rank, config, change)
    for name, config in {"bits": LOSSLESS, "codes": INT6}.items()
    for change in (spike, not_a_number, huge_step)
}


@pytest.fixture(scope="module")
def found():
    configs = {"bits": LOSSLESS, "FSDP2": ZeroPPConfig(ranks_per_node=2)}  # FSDP2's own collectives
    return run_in_turn(4, CHANGES | {name: partial(losses_and_bytes, config, 20) for name, config in configs.items()})


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_never_behind(found, change):
    """Whatever moved the weights, all ranks compute with the codes of the weights as they are now."""
    first = found[change][0][0]
    for seen, masters in found[change]:
        for ours, of_first in zip(seen, first, strict=True):
            assert torch.equal(ours.nan_to_num(9), of_first.nan_to_num(9))
        nans = sum(int(tensor.isnan().sum()) for tensor in masters)
        assert nans == 0 or any(tensor.isnan().any() for tensor in seen)
        largest = max(tensor.abs().nan_to_num(0).max() for tensor in masters)
        assert max(tensor.abs().nan_to_num(0).max() for tensor in seen) >= 0.98 * largest


def test_a_jump_takes_no_more_than_the_codes_in_full():
    """Rice codes of long moves, two bits and a sign above the code's own bits, at most."""
    format = WireFormat([ParameterShard("a", 2**16, True)], 8, 256, torch.bfloat16)
    old = format.encode(torch.randn(2**16), keeps_scales=True, kept=None)
    new = format.encode(torch.randn(2**16), keeps_scales=True, kept=old)
    assert len(encode_moves(format, old, new)) < 1.35 * format.nbytes


@pytest.mark.parametrize(
    "settings",
    [
        dict(weight_rounding="stochastic"),
        dict(weight_bits=3),
        dict(weight_intra_bits=8),
        dict(hpz_partition_size=1),
    ],
)
def test_what_moves_cannot_be_is_refused(settings):
    with pytest.raises(ValueError, match="weight_moves"):
        ZeroPPConfig(**dict(quantized_weights=True, hpz_partition_size=2, weight_moves=True) | settings)
