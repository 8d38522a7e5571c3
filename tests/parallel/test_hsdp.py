"""HSDP: replicas of shards train as ZeRO-3 does, as FSDP2 does it alone, and send what its meshes say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.init import init_weights
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import prepare_backward, shard_model
from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp
from tests.models.configs import gpt_config
from tests.parallel.layouts import EPS, TIMEOUT
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, train_each

REPLICAS = "--num-distributed-optimizer-instances"
HSDP = f"{REPLICAS} 2 --zeropp-ranks-per-node 2"


def test_it_trains_like_zero_3_at_every_stage(data):
    common = f"{NO_DROPOUT} {EPS} --train-iters 4 --eval-interval 2 --log-params-norm --log-num-zeros-in-grad"
    hsdp = {stage: f"{HSDP} --zero-stage {stage}" for stage in (1, 2, 3)} | {"one rank each": f"{REPLICAS} 4"}
    runs = {name: flags(data, common, more) for name, more in {"ZeRO-3": "", **hsdp}.items()}
    metrics = run_ranks(4, train_each, runs, timeout=TIMEOUT)[-1]
    expected = metrics.pop("ZeRO-3")
    for name, run in metrics.items():
        # A norm that counted replicas would be sqrt(2) times as large.
        for key in ("lm loss", "lm loss validation", "grad-norm", "params-norm"):
            assert run[key] == pytest.approx(expected[key], rel=1e-6), (name, key)
        # Sums in another order are zero elsewhere.
        assert run["num-zeros"] == pytest.approx(expected["num-zeros"], abs=2), name


CONFIG = gpt_config(2, 16, 2, 33, 8, attention_dropout=0.0, hidden_dropout=0.0)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_MICRO_BATCHES, NUM_STEPS = 3, 2


def _ours(model: Decoder) -> None:
    shard_model(model, Mesh("cpu", replicas=2), 3, POLICY, OffloadPolicy())
    apply_zeropp(model, ZeroPPConfig(ranks_per_node=2))


def _fsdp2_alone(model: Decoder) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)


def _trained(ours: bool) -> list[Tensor]:
    """Losses, and this rank's shards after NUM_STEPS."""
    with torch.device("meta"):
        model = Decoder(CONFIG)
    (_ours if ours else _fsdp2_alone)(model)
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    optimizer, results = torch.optim.AdamW(model.parameters()), list[Tensor]()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS):
        for i in range(NUM_MICRO_BATCHES):
            is_last = i == NUM_MICRO_BATCHES - 1
            if ours:
                prepare_backward(model, 3, is_last)
            else:
                model.set_requires_all_reduce(is_last)
            tokens = torch.randint(33, (2, 8), generator=generator)
            loss = model(tokens, tokens).mean()
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.detach().to_local() for parameter in model.parameters()]


def _both() -> tuple[list[Tensor], list[Tensor]]:
    return _trained(ours=True), _trained(ours=False)


def test_it_is_fsdp2s_own_to_the_bit():
    ranks = run_ranks(4, _both)
    for ours, expected in ranks:
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    shards = [ours[NUM_STEPS * NUM_MICRO_BATCHES :] for ours, _ in ranks]
    for of_ranks in zip(*shards, strict=True):
        assert all(torch.equal(of_ranks[rank], of_ranks[rank + 2]) for rank in (0, 1))  # the replicas


Layout = tuple[int, int, int]  # replicas, ranks of a node, ZeRO stage


class Sent(NamedTuple):
    """What a rank says of one step."""

    between: int
    within: int
    shards: list[int]  # elements of each unit's, the root's first
    description: str


def _traffic(layouts: list[Layout]) -> list[Sent]:
    found = []
    for replicas, ranks_per_node, stage in layouts:
        with torch.device("meta"):
            model = Decoder(CONFIG)
        shard_model(model, Mesh("cpu", replicas=replicas), stage, POLICY, OffloadPolicy())
        zeropp = apply_zeropp(model, ZeroPPConfig(ranks_per_node=ranks_per_node))
        model.to_empty(device="cpu")
        init_weights(model, seed=1)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for i in range(NUM_MICRO_BATCHES):
            prepare_backward(model, stage, i == NUM_MICRO_BATCHES - 1)
            model(tokens, tokens).mean().backward()
        sent = zeropp.traffic.take()
        shards = {unit.name: unit.whole.numel for unit in zeropp.units}
        found.append(Sent(sent.inter_node, sent.intra_node, [shards.pop(""), *shards.values()], zeropp.describe()))
    return found


# A replica on a node; two; two on each of two nodes; one over two nodes; one rank each.
LAYOUTS = [(*on_nodes, stage) for on_nodes in [(2, 2), (2, 4), (4, 2), (2, 1)] for stage in (2, 3)]


def test_bytes_are_those_of_its_rings():
    of_ranks = run_ranks(4, _traffic, LAYOUTS)
    for i, (replicas, ranks_per_node, stage) in enumerate(LAYOUTS):
        size = 4 // replicas
        for rank, found in enumerate(of_ranks):
            sent = found[i]
            root, *blocks = sent.shards
            gathered = NUM_MICRO_BATCHES * (root + 2 * sum(blocks)) if stage == 3 else root + sum(blocks)
            reduced = 2 * NUM_MICRO_BATCHES * (root + sum(blocks))  # gloo's reduce-scatter sends twice
            in_replica = (size - 1) * (2 * gathered + 4 * reduced)
            over_replicas = sum(2 * (replicas - 1) * math.ceil(4 * unit / replicas) for unit in sent.shards)
            replica, shard = divmod(rank, size)
            next_in_replica = replica * size + (shard + 1) % size
            next_replica = (replica + 1) % replicas * size + shard
            expected = [0, 0]  # within nodes, between them
            expected[rank // ranks_per_node != next_in_replica // ranks_per_node] += in_replica
            expected[rank // ranks_per_node != next_replica // ranks_per_node] += over_replicas
            assert [sent.within, sent.between] == expected, (LAYOUTS[i], rank)
            assert sent.description.endswith(f"; in each of {replicas} replicas, whose gradients are added up")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.mark.long
def test_checkpoints_go_to_zero_3_and_back(data, tmp_path):
    common = f"{NO_DROPOUT} {EPS} --log-params-norm"
    ways = {"to ZeRO-3": (HSDP, ""), "from ZeRO-3": ("", HSDP)}
    save = {way: f"--save {tmp_path / way[:2]} --load {tmp_path / way[:2]} --save-interval 4" for way in ways}
    first = {way: flags(data, common, save[way], before, "--exit-interval 4") for way, (before, _) in ways.items()}
    second = {way: flags(data, common, save[way], after) for way, (_, after) in ways.items()}
    begun, ended = (run_ranks(4, train_each, runs)[-1] for runs in ({"": flags(data, common)} | first, second))
    for way in ways:
        for key in ("lm loss", "grad-norm", "params-norm"):
            assert begun[way][key] + ended[way][key] == pytest.approx(begun[""][key], rel=1e-5), (way, key)
    hsdp, zero_3 = (_size(tmp_path / folder / "iter_0000004") for folder in ("to", "fr"))
    assert hsdp == pytest.approx(zero_3, rel=0.1)  # each shard is written once; ZeRO-3 has more of them, with headers
