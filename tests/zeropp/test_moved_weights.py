"""Weights sent as moves of codes: with bf16's own bits training equals FSDP2's to the bit, in fewer bytes."""

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
from tests.zeropp.training_on_ranks import shard

LOSSLESS = ZeroPPConfig(hpz_partition_size=2, weight_moves=True)


def losses_and_bytes(config, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 48))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    zeropp = shard(model, config, [model[0]], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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


@pytest.fixture(scope="module")
def found():
    configs = {"bits": LOSSLESS, "FSDP2": ZeroPPConfig(ranks_per_node=2)}  # FSDP2's own collectives
    return run_in_turn(4, {name: partial(losses_and_bytes, config, 20) for name, config in configs.items()})


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
