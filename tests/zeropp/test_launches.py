"""Which CUDA kernels encode the shards of large models, on clusters of many sizes.

The formats are those of a training step on fake CUDA tensors (test_fake_cuda.py says what these are). Which kernels
are launched for them says csrc/cuda/kernels.cu itself, built for a CPU. That these read vectors wherever a parameter
begins, and have no other path, is test_cuda_build.py's to show.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import ARCHITECTURES, padded_vocab_size
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.planning.needs.division import shards_of, units_of
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.wire import kernels
from megatron_zpp.zeropp.wire.format import wire_format
from tests.ranks import run_ranks
from tests.zeropp.order.fake_cuda import CUDA, fake_cuda

HERE = Path(__file__).parent / "cuda_on_cpu"
VOCABULARIES = {"gpt-13b": 50257, "llama-8b": 128256}
BFLOAT16, FLOAT, PEERS = kernels.TYPES[torch.bfloat16], kernels.TYPES[torch.float32], -1
ALL = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=8,
    quantized_gradients=True,
    loco=LoCoConfig(exact_undo=False),
)

pytestmark = pytest.mark.skipif(kernels.why_not_loaded is not None, reason=f"needs kernels: {kernels.why_not_loaded}")

Table = tuple[int, ...]
Encoding = tuple[
    int, Table, Table, Table
]  # of values of this type, or of what peers sent: formats of wire, peers, error


def model_of(preset: str, device: torch.device) -> Transformer:
    """With one of its layers."""
    architecture = next(each for each in ARCHITECTURES if preset in each.presets)
    flags = f"--preset {preset} --num-layers 1 --vocab-size {VOCABULARIES[preset]} --mock-data --train-iters 1 --lr 1"
    settings = parse_settings(architecture, [*flags.split(), "--micro-batch-size", "1"]).model
    with device:
        return architecture.module(
            architecture.build_config(
                settings, padded_vocab_size(VOCABULARIES[preset], settings.make_vocab_size_divisible_by)
            )
        )


def encodings(preset: str, nodes: int) -> dict[str, set[Encoding]]:
    """What ranks of nodes of 8 encode of each unit with the default blocks, by what it is."""
    found: dict[str, set[Encoding]] = {}
    for unit in units_of(model_of(preset, torch.device("meta"))):
        shards = shards_of(unit, 8 * nodes)

        def table(bits: int | None, block_size: int, dtype: torch.dtype, shards: Any = shards) -> Table:
            return tuple(wire_format(shards, bits, block_size, dtype).table)

        within, error = table(8, 128, torch.bfloat16), table(8, 128, torch.float32)
        for what, encoding in {
            "weights": (BFLOAT16, table(8, 256, torch.bfloat16), (), ()),
            "weights in 16 bits": (BFLOAT16, table(None, 256, torch.bfloat16), (), ()),
            "gradients within a node": (BFLOAT16, within, (), ()),
            "gradients between nodes": (PEERS, table(4, 128, torch.float32), within, error),
        }.items():
            found.setdefault(what, set()).add(encoding)
    return found


class Encodings(TorchDispatchMode):
    """The different calls of ``encode`` in here."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Encoding] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.megatron_zpp.encode.default:
            values, _, peers, _, _, format, _, _, error, *_ = args
            type = kernels.TYPES[values.dtype] if values is not None else PEERS
            self.seen.add((type, tuple(format), tuple(peers), tuple(error)))
        return func(*args, **(kwargs or {}))


def _encodings_of_two_steps(preset: str, nodes: int) -> set[Encoding]:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=5, world_size=8 * nodes, store=FakeStore())
    mesh = init_device_mesh("cuda", (8 * nodes,))
    with fake_cuda(), Encodings() as encodings:
        model = model_of(preset, CUDA)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)  # as the trainer
        for module in (*model.layers, *model.end_units(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        with _disable_current_modes():
            zeropp = apply_zeropp(model, ALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            for is_last in (False, True):
                zeropp.set_is_last_micro_batch(is_last)
                model(torch.zeros(1, 16, dtype=torch.int64, device=CUDA)).float().sum().backward()
            optimizer.step()
        return encodings.seen


@pytest.mark.long
@pytest.mark.parametrize("preset, nodes", [("gpt-13b", 8), ("llama-8b", 12)])
def test_a_step_encodes_in_these_formats(preset, nodes):
    expected = encodings(preset, nodes)
    del expected["weights in 16 bits"]
    assert run_ranks(1, _encodings_of_two_steps, preset, nodes) == [set().union(*expected.values())]


@pytest.fixture(scope="module")
def encoded_by(tmp_path_factory) -> Callable[[Encoding], tuple[int, int]]:
    """How many segments of a format kernels for tiles encode, and how many those for blocks."""
    library = tmp_path_factory.mktemp("launches") / "launches.so"
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-Wno-unknown-pragmas", f"-I{HERE}"]
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, and there is no {compiler}")
    subprocess.run([compiler, *flags, str(HERE / "launches.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).encoded_by

    def numbers(table: Sequence[int]) -> Any:
        return (ctypes.c_int64 * len(table))(*table)

    def encoded_by(encoding: Encoding) -> tuple[int, int]:
        type, *tables = encoding
        sized = [argument for table in tables for argument in (numbers(table), ctypes.c_int64(len(table)))]
        segments = numbers([0, 0])
        function(ctypes.c_int64(type), *sized, segments)
        tiles, blocks = segments
        return tiles, blocks

    return encoded_by


@pytest.mark.parametrize("nodes", [8, 12, 16, 48, 64, 128])
@pytest.mark.parametrize("preset", VOCABULARIES)
def test_tile_kernels_encode_all_that_travels_in_blocks_of_128_and_256(encoded_by, preset, nodes):
    for what, of_units in encodings(preset, nodes).items():
        largest = 0
        for encoding in of_units:
            _, table, _, _ = encoding
            block_sizes = table[7::5]  # of its segments; 0 = unquantized
            assert encoded_by(encoding) == (len(block_sizes), 0), what
            largest = max(largest, *block_sizes)
        sizes = {"weights": 256, "weights in 16 bits": 0}
        assert largest == sizes.get(what, 128), what


def test_blocks_of_other_sizes_are_seen_to_take_the_other_kernels(encoded_by):
    shards = shards_of([("weight", torch.nn.Parameter(torch.empty(8, 100)))], 8)  # one block of 104
    table = tuple(wire_format(shards, 4, 128, torch.float32).table)
    assert encoded_by((FLOAT, table, (), ())) == encoded_by((PEERS, table, table, table)) == (0, 1)
