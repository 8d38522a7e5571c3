"""Lighthouses and elastic islands as processes of their own, and what these saved."""

import atexit
import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.islands import apply_islands
from tests.conftest import ROOT
from tests.islands.elastic_island import INTERVAL, build_sharded, config_of, train_step
from tests.ranks import free_port
from tests.tools import run
from tests.training.small_run import ended, torchrun

Saved = dict[str, list[Tensor]]


def run_commands_of_page(block: int, end: str, folder: Path) -> str:
    """Run a block of docs/how-to/elastic-islands.md, and ``end`` in the same shell, where %1 is the lighthouse."""
    page = (ROOT / "docs" / "how-to" / "elastic-islands.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    return run("bash", "-c", f"{blocks[block]}\n{end}", folder=folder).stdout


@functools.cache
def secret_file() -> str:
    """Return a file that is removed when this process ends."""
    file = Path(tempfile.mkdtemp(prefix="islands")) / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, file.parent)
    return str(file)


@contextmanager
def lighthouse(
    port: int | None = None, min_islands: int = 1, host: str = "localhost", launcher: Sequence[str] = ()
) -> Iterator[str]:
    """Start a lighthouse, which takes two seconds without a heartbeat for silence; yield its address."""
    address = f"{host}:{port or free_port()}"
    words = f"-m megatron_zpp lighthouse --heartbeat-timeout 2 --bind {address} --min-islands {min_islands}".split()
    command = [*launcher, sys.executable, *words, "--secret-file", secret_file()]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def start(address: str, folder: Path, island: int, islands: int, ranks: int = 2, **more: object) -> subprocess.Popen:
    words = [str(folder), str(island), str(islands), *words_of(address, **more)]
    return torchrun(ranks, words, script="tests/islands/elastic_island.py")


def words_of(address: str, **more: object) -> list[str]:
    return [f"{name}={value}" for name, value in ({"lighthouse": address, "secret": secret_file()} | more).items()]


def logs_of(*islands: subprocess.Popen) -> list[str]:
    """Wait for the islands to succeed; return what each logged."""
    errors = [ended(island)[1] for island in islands]
    return ["\n".join(re.findall(r"^island \d: .*", error, flags=re.MULTILINE)) for error in errors]


def saved_by(folder: Path, island: int) -> dict[int, Saved]:
    """Return an island's outer state after each step."""
    files = folder.glob(f"{island}.*.outer")
    return {int(file.name.split(".")[1]): torch.load(file, weights_only=False) for file in files}


def assert_same_bits(one: Saved, other: Saved) -> None:
    for kind in ("parameters", "momentum"):
        assert one[kind] and all(torch.equal(a, b) for a, b in zip(one[kind], other[kind], strict=True))


def wait_until(is_true: Callable[[], bool], *islands: subprocess.Popen) -> None:
    """Fail if one of the islands ends before."""
    deadline = time.monotonic() + 120
    while not is_true():
        ended = [island for island in islands if island.poll() is not None]
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for(file: Path, *islands: subprocess.Popen) -> None:
    wait_until(file.exists, *islands)


def wake(stopped: Path) -> None:
    os.kill(int(stopped.read_text()), signal.SIGCONT)


def islands_of_one_job(islands: int, bits: int, steps: int) -> dict[int, list[Tensor]]:
    """Return the outer parameters after each step of islands that are ranks of one job."""
    ranks = dist.get_world_size() // islands
    mesh = init_device_mesh("cpu", (islands, ranks), mesh_dim_names=("island", "shard"))
    island, shard = mesh.get_coordinate()
    model, optimizer = build_sharded(0, mesh["shard"])
    outer_sync = apply_islands(model, optimizer, config_of(bits), mesh["island"])
    found = {}
    for step in range(1, steps + 1):
        train_step(model, optimizer, island, step, shard, ranks)
        if step % INTERVAL == 0:
            with outer_sync.outer_parameters():
                found[step] = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    return found
