"""Which CUDA kernels encode the shards of large models, in the formats that test_fake_cuda.py finds in a training step.

csrc/cuda itself says that, built for a CPU. That kernels for tiles read vectors wherever a parameter begins,
and have no other path, is test_cuda_build.py's to show.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.zeropp.wire import kernels
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard

HERE = Path(__file__).parent / "cuda_on_cpu"
BFLOAT16, FLOAT, PEERS = kernels.TYPES[torch.bfloat16], kernels.TYPES[torch.float32], -1
# One rank's of Llama-8B's layer on 96 ranks: a remainder behind whole blocks, and norms that shift what follows.
SHARDS = [
    ParameterShard(str(i), numel, numel > 43) for i, numel in enumerate((43, 43 * 4096, 11 * 4096, 43 * 14336 + 3, 43))
]
pytestmark = pytest.mark.skipif(kernels.why_not_loaded is not None, reason=f"needs kernels: {kernels.why_not_loaded}")


def table(bits: int | None, block_size: int, dtype: torch.dtype, shards: list[ParameterShard] = SHARDS) -> list[int]:
    return list(WireFormat(shards, bits, block_size, dtype).table)


@pytest.fixture(scope="module")
def encoded_by(tmp_path_factory) -> Callable[..., tuple[int, int]]:
    """How many segments of a format kernels for tiles encode, and how many those for blocks."""
    library = tmp_path_factory.mktemp("launches") / "launches.so"
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-Wno-unknown-pragmas", f"-I{HERE}"]
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, and there is no {compiler}")
    subprocess.run([compiler, *flags, str(HERE / "launches.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).encoded_by

    def numbers(table: list[int]) -> Any:
        return (ctypes.c_int64 * len(table))(*table)

    def encoded_by(type: int, *tables: list[int]) -> tuple[int, int]:
        """``type``: of the values, or PEERS; ``tables``: the formats of the wire, of the peers and of the error."""
        sized = [argument for table in tables for argument in (numbers(table), ctypes.c_int64(len(table)))]
        segments = numbers([0, 0])
        function(ctypes.c_int64(type), *sized, segments)
        return segments[0], segments[1]

    return encoded_by


def test_tile_kernels_encode_blocks_of_128_and_256_and_others_take_the_other_kernels(encoded_by):
    within, error = table(8, 128, torch.bfloat16), table(8, 128, torch.float32)
    in_tiles = [
        (BFLOAT16, table(8, 256, torch.bfloat16), [], []),  # weights
        (BFLOAT16, table(None, 256, torch.bfloat16), [], []),  # in 16 bits
        (BFLOAT16, within, [], []),  # gradients within a node
        (PEERS, table(4, 128, torch.float32), within, error),  # gradients between nodes
    ]
    for encoding in in_tiles:
        assert encoded_by(*encoding) == (len(encoding[1][7::5]), 0)
    small = table(4, 128, torch.float32, [ParameterShard("weight", 100, True)])  # one block of 104
    assert encoded_by(FLOAT, small, [], []) == encoded_by(PEERS, small, small, small) == (0, 1)
