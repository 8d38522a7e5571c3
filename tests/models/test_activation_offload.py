"""Activation offloading: gradients to the bit, what leaves and how often, and the order of streams."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_zpp.models import activation_offload
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.activation_offload import ActivationOffload
from tests.models.test_models import CONFIGS, batch, build
from tests.ranks import run_ranks
from tests.zeropp.order.fake_cuda import CUDA, fake_cuda
from tests.zeropp.order.programs import CONFIGS as ZEROPP
from tests.zeropp.order.programs import PROGRAMS, Loop
from tests.zeropp.order.races import find_races
from tests.zeropp.order.recorder import Recorder
from tests.zeropp.order.test_order import _without_program
from tests.zeropp.order.trace import Operation, waits
from tests.zeropp.test_fake_cuda import Host
from tests.zeropp.training_on_ranks import Net


def gradients(model) -> dict[str, torch.Tensor]:
    """Return gradients of 3 micro-batches: two forward passes first, as in a pipeline, and one backward pass twice."""
    torch.manual_seed(3)  # dropout
    tokens, labels = batch()
    first, second = (model(tokens, labels).mean() for _ in range(2))
    first.backward(retain_graph=True)
    third = model(labels, tokens).mean()
    for loss in (second, first, third):
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


MLPS = ("selective", None, None, ("mlp",))


@pytest.mark.parametrize("choice", [None, ("full",), ("full", "block", 1), MLPS], ids=str)
@CONFIGS
def test_gradients_stay_to_the_bit(config, choice):
    config = dataclasses.replace(config, num_layers=3, hidden_dropout=0.2, attention_dropout=0.1)
    models = {num_layers: build(config) for num_layers in (0, 1, 2, 3)}
    for num_layers, model in models.items():
        if choice is not None:
            apply_activation_checkpointing(model, *choice)
        ActivationOffload().apply(model.layers, num_layers)
    expected = gradients(models.pop(0))
    for num_layers, model in models.items():
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, expected[name]), (num_layers, name)


def record(config):
    """Return the races of a loop, and for each wait of this package's offloading how many there are without it."""
    with patch.object(activation_offload, "SMALLEST", 1), Recorder() as recorder:
        loop = Loop(*ZEROPP[config])
        ActivationOffload().apply(loop.model.blocks, 2)
        for program in ("accumulation", "recomputation"):
            PROGRAMS[program](loop)
        loop.model.order = [0, 1]  # offloaded to the last block
        for losses in ([loop.model(loop.tokens()) for _ in range(2)], [loop.model(loop.tokens())]):
            for output in losses:
                output.float().square().mean().backward()
    trace, planted = recorder.trace, {}
    lines = [line for line in waits(trace) if line[0].file == "activation_offload.py"]
    for line in lines if dist.get_rank() == 0 else ():
        key = _without_program(line)
        planted[key] = len(find_races(trace, without=line))
    return [str(race) for race in find_races(trace)], planted


def test_copies_race_with_nothing_and_need_every_wait():
    results = run_ranks(2, record, "all", timeout=600)
    assert [races for races, _ in results] == [[], []]
    planted = results[0][1]
    assert len(planted) >= 3 and all(planted.values()), planted


def on_fake_gpu():
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cuda", (4,))
    with fake_cuda(), Host() as host, Recorder("cuda") as recorder:
        with CUDA:
            model = Net(64, 256, 512, num_blocks=3)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        ActivationOffload().apply(model.blocks, 2)
        for _ in range(2):
            host.waits.clear()
            begin = len(recorder.trace)
            model(torch.empty(16, 64, device=CUDA)).square().mean().backward()
    copies = [step.stream for step in recorder.trace[begin:] if isinstance(step, Operation) and "copy_" in step.name]
    own = [stream for stream in copies if "_copies" in stream]
    return host.waits, [str(race) for race in find_races(recorder.trace)], own


def test_a_gpu_copies_beside_compute_and_its_host_waits_for_nothing():
    ((waited, races, own),) = run_ranks(1, on_fake_gpu)
    assert waited == [] and races == []
    assert own
