"""Lighthouses and islands as processes of their own, and what these kept."""

from __future__ import annotations

import atexit
import functools
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.islands import apply_islands
from megatron_zpp.islands.elastic.channel import read_secret
from megatron_zpp.islands.elastic.lighthouse import status
from tests.conftest import ROOT, environment
from tests.islands.leaving_island import INTERVAL, batch_of, build_model, config_of
from tests.ranks import free_port
from tests.training.small_run import torchrun

Kept = dict[str, list[Tensor]]


def run_commands_of_page(block: int, end: str, folder: Path) -> str:
    """What the islands print that one of the two blocks in docs/islands.md starts. end: shell; %1 is the lighthouse."""
    page = (ROOT / "docs" / "islands.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run(
        ["bash", "-c", f"{blocks[block]}\n{end}"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def secret_file() -> str:
    """A file that is there until this process ends."""
    file = Path(tempfile.mkdtemp(prefix="islands")) / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, file.parent)
    return str(file)


@contextmanager
def lighthouse(
    port: int | None = None, min_islands: int = 1, host: str = "localhost", launcher: Sequence[str] = ()
) -> Iterator[str]:
    """The address of one, a process of its own. An island is silent after two seconds without a sign."""
    at = f"{host}:{port or free_port()}"
    program = "-m megatron_zpp lighthouse --heartbeat-timeout 2"
    words = [*program.split(), "--bind", at, "--secret-file", secret_file(), "--min-islands", str(min_islands)]
    process = subprocess.Popen([*launcher, sys.executable, *words], stderr=subprocess.DEVNULL)
    try:
        yield at
    finally:
        process.kill()
        process.wait()


def start(at: str, folder: Path, island: int, islands: int, ranks: int = 2, **more: object) -> subprocess.Popen:
    words = [str(folder), str(island), str(islands), *words_of(at, **more)]
    return torchrun(ranks, words, script="tests/islands/leaving_island.py")


def words_of(at: str, **more: object) -> list[str]:
    return [f"{name}={value}" for name, value in ({"lighthouse": at, "secret": secret_file()} | more).items()]


def said(island: subprocess.Popen) -> str:
    """By an island that ends well, to its log."""
    _, err = island.communicate(timeout=150)
    assert island.returncode == 0, err
    return "\n".join(re.findall(r"^island \d: .*", err, flags=re.MULTILINE))


def kept(folder: Path, island: int) -> dict[int, Kept]:
    """What an island had agreed on behind each step."""
    return {
        int(file.name.split(".")[1]): torch.load(file, weights_only=False) for file in folder.glob(f"{island}.*.agreed")
    }


def assert_same_bits(one: Kept, other: Kept) -> None:
    for kind in ("agreed", "momentum"):
        assert one[kind] and all(torch.equal(a, b) for a, b in zip(one[kind], other[kind], strict=True))


def wait_for(file: Path, *islands: subprocess.Popen) -> None:
    """Until an island keeps it; an error where one of them ends before."""
    deadline = time.monotonic() + 120
    while not file.exists():
        ended = [island for island in islands if island.poll() is not None]
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_asking(at: str, islands: int) -> None:
    """Until so many islands wait at the lighthouse for the others."""
    deadline = time.monotonic() + 120
    while len(status(at, read_secret(secret_file()))["asking"]) < islands:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def islands_of_one_job(islands: int, bits: int, steps: int) -> dict[int, list[Tensor]]:
    """What they agree on behind each step as ranks of one job, which cannot leave."""
    mesh = init_device_mesh("cpu", (islands, dist.get_world_size() // islands), mesh_dim_names=("island", "shard"))
    island, shard = mesh.get_coordinate()
    model = build_model(0)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    agreements = apply_islands(model, optimizer, config_of(bits), mesh["island"])
    found = {}
    for step in range(1, steps + 1):
        inputs, targets = (part.chunk(mesh.shape[1])[shard] for part in batch_of(island, step))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        if step % INTERVAL == 0:
            with agreements.agreed_parameters():
                found[step] = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    return found
