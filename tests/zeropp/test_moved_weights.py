"""Weights sent as moves of codes: with bf16's own bits training equals FSDP2's to the bit; nothing is ever behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import KeptScales, ParameterShard
from megatron_zpp.zeropp.wire.moves import encode_moves
from tests.ranks import run_ranks
from tests.training.small_run import ROOT, flags, torchrun, train_each, write_text
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


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.long)])
def test_moved_bits_train_as_fsdp2_does_to_the_bit(steps):
    ours = run_ranks(4, losses_and_bytes, LOSSLESS, steps)
    theirs = run_ranks(4, losses_and_bytes, ZeroPPConfig(ranks_per_node=2), steps)  # FSDP2's own collectives
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    sent = ours[0][1]  # of a rank whose gradients FSDP2's ring does not send between nodes: weights, first in full
    assert sum(sent) < 0.8 * steps * sent[0]


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


@pytest.mark.parametrize("config", [LOSSLESS, INT6], ids=["lossless", "int6"])
@pytest.mark.parametrize("change", [spike, not_a_number, huge_step])
def test_weights_are_never_behind(config, change):
    """Whatever moved the weights, all ranks compute with the codes of the weights as they are now."""
    ranks = run_ranks(4, weights_of_every_rank, config, change)
    for seen, masters in ranks:
        for ours, first in zip(seen, ranks[0][0], strict=True):
            assert torch.equal(ours.nan_to_num(9), first.nan_to_num(9))
        nans = sum(int(tensor.isnan().sum()) for tensor in masters)
        assert nans == 0 or any(tensor.isnan().any() for tensor in seen)
        largest = max(tensor.abs().nan_to_num(0).max() for tensor in masters)
        assert max(tensor.abs().nan_to_num(0).max() for tensor in seen) >= 0.98 * largest


def test_a_jump_takes_no_more_than_the_codes_in_full():
    """Rice codes of long moves, two bits and a sign above the code's own bits, at most."""
    format = WireFormat([ParameterShard("a", 2**16, True)], 8, 256, torch.bfloat16)
    old = format.encode(torch.randn(2**16), kept=KeptScales(None))
    new = format.encode(torch.randn(2**16), kept=KeptScales(old))
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


KILLED = """
import os, signal
if os.environ.get("RANK") == "1":
    from megatron_zpp.zeropp.gather import all_gather
    receive, calls = all_gather.HierarchicalAllGather._receive, [0]
    def killed(self, shard):
        calls[0] += self._sent.are_moves
        if calls[0] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(self, shard)
    all_gather.HierarchicalAllGather._receive = killed
"""


@pytest.mark.long
def test_a_rank_that_is_killed_between_encoding_and_applying_leaves_nobody_behind(tmp_path):
    """The others end too; a run that goes on from the last checkpoint has the losses of one that was not killed."""
    data = write_text(tmp_path / "data")
    zeropp = "--zero-quantized-weights --zero-hpz-partition-size 2 --zeropp-weight-moves --global-batch-size 4"
    save = f"--save {tmp_path / 'run'} --save-interval 2 --no-async-save"
    length = "--train-iters 8"
    expected = run_ranks(4, train_each, {"": flags(data, zeropp, length=length)})[0][""]["lm loss"]
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    process = torchrun(4, flags(data, zeropp, save, length=length), warm=False, PYTHONPATH=f"{tmp_path}:{ROOT}")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1 and "exitcode  : -9" in err, err[-3000:]
    resumed = flags(data, zeropp, f"--load {tmp_path / 'run'}", length=length)
    losses = run_ranks(4, train_each, {"": resumed})[0][""]["lm loss"]
    assert 0 < len(losses) < 8 and losses == expected[-len(losses) :]
