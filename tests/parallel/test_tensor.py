"""Tensor and sequence parallelism: random numbers, the loss, initial weights, ZeRO++."""

import contextlib
import hashlib
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_zpp.models import cross_entropy, init
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import shard_model
from megatron_zpp.parallel.tensor import apply_tensor_parallelism
from tests.families.find import architecture_of
from tests.models.configs import gpt_config, llama_config
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import flags, start, train_quietly


def train_and_look(argv: list[str]) -> dict[str, Any]:
    """Runs on each rank: states of random numbers, in attention and outside; parameters that all ranks hold; losses."""
    run, metrics = start(argv)
    seen: dict[str, list[bytes]] = {"attention": [], "mlp": []}
    block = run.model.layers[0]

    def look(where: str) -> Any:
        def note(module: Any, inputs: Any) -> None:
            if module.training:
                seen[where].append(hashlib.sha256(torch.get_rng_state().numpy()).digest())

        return note

    block.self_attention.linear_proj.register_forward_pre_hook(look("attention"))
    block.mlp.register_forward_pre_hook(look("mlp"))
    train_quietly(run)
    for module in reversed(list(run.model.modules())):
        if isinstance(module, FSDPModule):
            module.reshard()
    kept_by_all = {
        name: p.to_local().detach().clone()
        for name, p in run.model.named_parameters()
        if p.placements[-1].is_replicate()
    }
    return seen | {"loss": metrics["lm loss"], "kept_by_all": kept_by_all}


@pytest.mark.parametrize("more", ["", pytest.param("--sequence-parallel", marks=pytest.mark.long)])
def test_dropout_and_parameters_that_all_ranks_hold(data, more):
    """tp 2 x dp 2, dropout of 0.1 everywhere: what the two ranks of a group share, and what not."""
    few = flags(
        data, f"--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 {more}"
    )
    few += ["--train-iters", "3"]
    calls = {"": partial(train_and_look, few)}
    if not more:
        calls["recomputed"] = partial(train_and_look, [*few, "--recompute-granularity", "full"])
    found = run_in_turn(4, calls)
    ranks = found[""]
    for dp in (0, 1):
        ours, theirs = ranks[2 * dp], ranks[2 * dp + 1]
        assert len(ours["attention"]) == 3 and len(set(ours["attention"])) == len(ours["attention"])
        assert set(ours["attention"]).isdisjoint(theirs["attention"])
        assert (ours["mlp"] == theirs["mlp"]) == (not more)
        assert len(ours["kept_by_all"]) == 2 * 6 + 3  # norms, summed biases; final norm, positions
        for name, value in ours["kept_by_all"].items():
            assert torch.equal(value, theirs["kept_by_all"][name]), name
    assert set(ranks[0]["mlp"]).isdisjoint(ranks[2]["mlp"])  # other samples, other draws
    if not more:  # recomputation draws what was drawn before
        assert found["recomputed"][0]["loss"] == pytest.approx(ranks[0]["loss"], rel=1e-6)


def losses_by_rows(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Runs on each rank: losses and gradients of the whole vocabulary, and of its rows on the ranks."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 16, generator=generator).to(dtype).requires_grad_()
    hidden = torch.randn(2, 8, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(24, (2, 8), generator=generator)
    labels[0, 0], labels[1, 3] = 24, -1  # no such rows
    factors = torch.randn(2, 8, generator=generator)
    cross_entropy.VOCABULARY_BLOCK = 5

    def results(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        loss = cross_entropy.linear_cross_entropy(hidden, weight, labels)
        gradients = torch.autograd.grad((loss * factors).nansum(), [hidden, weight])
        return [loss.detach(), *gradients]

    expected = results(hidden, weight)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    sequence = distribute_tensor(hidden.detach(), mesh, [Shard(1)]).requires_grad_()
    result = results(sequence, shard)
    return expected, [result[0], *(gradient.full_tensor() for gradient in result[1:])]


def test_the_loss_over_sharded_vocabulary_and_sequence():
    found = run_in_turn(4, {str(dtype): partial(losses_by_rows, dtype) for dtype in (torch.float32, torch.bfloat16)})
    for dtype, of_ranks in found.items():
        tolerance = 1e-6 if "float32" in dtype else 2e-2
        for expected, result in of_ranks:
            assert result[0].dtype == torch.float32 and result[0].isnan().sum() == 2
            for ours, theirs in zip(result, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def initial_weights(config: DecoderConfig, tp_size: int) -> dict[str, Tensor]:
    """Runs on each rank: whole initial weights, put together from the ranks' parts."""
    init.BLOCK_ELEMENTS = 500
    architecture = architecture_of(config)
    model = architecture.build_empty(config)
    mesh = Mesh("cpu", {"tp": tp_size})
    if tp_size > 1:
        plan = architecture.tensor_parallel_plan(config, False)
        apply_tensor_parallelism(model, mesh, plan, sequence_parallel=False)
    shard_model(model, mesh, 3, MixedPrecisionPolicy(), OffloadPolicy())
    model.to_empty(device="cpu")
    init.init_weights(model, seed=5)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_initial_weights_do_not_depend_on_the_layout():
    """tp 2 x dp 3: rows that neither divides evenly, and shards without any."""
    configs = {
        "gpt": gpt_config(2, 36, 4, vocab_size=130, max_position_embeddings=3, tie_embeddings=False),
        "llama": llama_config(2, 36, 12, vocab_size=132, num_query_groups=2, ffn_hidden_size=50),
    }
    alone, split = (
        run_in_turn(world_size, {name: partial(initial_weights, config, tp) for name, config in configs.items()})
        for world_size, tp in ((1, 1), (6, 2))
    )
    for name, (expected,) in alone.items():
        for weights in split[name]:
            assert all(torch.equal(weights[key], value) for key, value in expected.items()), name


def error_of(argv: list[str]) -> str:
    """Runs on each rank: why a run was refused."""
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(FailedTogether):
        start(argv)
    return err.getvalue()


def test_a_vocabulary_that_does_not_divide_is_refused(data):
    argv = flags(data, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1")
    refused = run_ranks(2, error_of, argv)[0]
    assert "size 2 does not divide the vocabulary of 257" in refused
    assert "--make-vocab-size-divisible-by 2" in refused and "1, 257" in refused
