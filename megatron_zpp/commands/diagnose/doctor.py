"""``megatron-zpp doctor``: say what a node lacks before a run; under torchrun, of all nodes, with their links measured.

megatron-zpp doctor
torchrun --nnodes 8 --nproc-per-node 8 -m megatron_zpp doctor
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_zpp.zeropp.fsdp.topology import build_topology
from megatron_zpp.zeropp.wire import kernels

Check = tuple[str, str, str]  # what, what was found, what to do about it: empty if nothing

SHARED_MEMORY, OPEN_FILES, CORES_PER_GPU = 2**30, 4096, 4  # less than this deserves a look
LINK_SECONDS = 1.0  # of one collective, after which larger ones are not measured


def software() -> Iterator[Check]:
    wanted = next(need for need in requires("megatron_zpp") or [] if need.startswith("torch"))
    least, below = [
        tuple(map(int, version.split(".")))
        for version in sorted(re.findall(r"[\d.]+", wanted), key=lambda v: [*map(int, v.split("."))])
    ]
    fits = least <= tuple(map(int, torch.__version__.split(".")[:2])) < below
    yield "torch", torch.__version__, "" if fits else f"install {wanted}"
    reason = kernels.why_not_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    yield "kernels", "plain torch, several times slower" if reason else "compiled", reason or ""
    missing = [name for name in ("numpy", "rich", "sentencepiece") if importlib.util.find_spec(name) is None]
    yield (
        "trainer's packages",
        f"without {', '.join(missing)}" if missing else "there",
        "install the extra train" if missing else "",
    )


def gpus() -> Iterator[Check]:
    count, has_driver = torch.cuda.device_count(), shutil.which("nvidia-smi") is not None
    if count == 0:
        advice = ""
        if has_driver and torch.version.cuda is None:
            advice = "this torch is a CPU build: install one for CUDA"
        elif has_driver:
            advice = f"torch was built for CUDA {torch.version.cuda} and finds no device: is the driver too old?"
        yield "GPUs", "none", advice
        return
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    yield "GPUs", f"{count} x {', '.join(sorted(names))}", "" if len(names) == 1 else "ranks are as fast as the slowest"
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none", ""
    fabric = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield (
        "InfiniBand",
        ", ".join(fabric) or "none",
        "" if fabric else "NCCL uses TCP: NCCL_SOCKET_IFNAME names the link",
    )
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    advice = "unset it: all streams share one queue, and nothing overlaps"
    yield "CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"), advice * one_queue


def machine() -> Iterator[Check]:
    cores, count = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    enough = count == 0 or cores >= CORES_PER_GPU * count
    yield "CPU cores", str(cores), "" if enough else f"fewer than {CORES_PER_GPU} for each GPU: loaders will be slow"
    shared = shutil.disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else 0
    advice = (
        ""
        if shared >= SHARED_MEMORY
        else "too small for data workers and NCCL: docker run --shm-size 8g, or --ipc=host"
    )
    yield "/dev/shm", f"{shared / 2**30:.1f} GiB", advice
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "open files", str(files), "" if files >= OPEN_FILES or files < 0 else f"raise it: ulimit -n {OPEN_FILES}"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    advice = "InfiniBand needs ulimit -l unlimited" if locked >= 0 and Path("/sys/class/infiniband").exists() else ""
    yield "locked memory", "unlimited" if locked < 0 else f"{locked / 2**20:.0f} MiB", advice
    try:
        address = socket.gethostbyname(socket.gethostname())
        advice = (
            "" if not re.match(r"127\.", address) else "other nodes cannot reach this address: set GLOO_SOCKET_IFNAME"
        )
        yield (
            "host name",
            f"{socket.gethostname()} is {address}",
            advice * (int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1),
        )
    except OSError as error:
        yield "host name", f"{socket.gethostname()}: {error}", "add it to /etc/hosts: gloo looks it up"


def links(device: torch.device) -> Iterator[Check]:
    """Measure within and between nodes. Collective."""
    from megatron_zpp.planning.measure import Options, measure_links

    group = dist.group.WORLD
    assert group is not None
    topology = build_topology(group, None)
    options = Options(device, 64, 16, seconds=0.05, least_repeats=2, most_seconds=LINK_SECONDS, is_brief=True)
    found = measure_links(topology, options)
    if topology.ranks_per_node > 1:
        delay = found["within_microseconds"]
        yield "links within a node", f"{found['within_gbytes']:.3g} GB/s a rank, {delay:.0f} microseconds a hop", ""
    if topology.num_nodes > 1:
        delay = found["between_microseconds"]
        yield "links between nodes", f"{found['between_gbits']:.3g} Gbit/s out of a node, {delay:.0f} microseconds", ""


def show(title: str, checks: list[Check]) -> None:
    width = max(len(what) for what, _, _ in checks)
    print(title)
    for what, found, advice in checks:
        print(f"  {'LOOK' if advice else 'ok':4}  {what:{width}}  {found}" + (f": {advice}" if advice else ""))


def run() -> int:
    """Print the checks. Return 1 if something deserves a look on this node; under torchrun 0."""
    of_node = [*software(), *gpus(), *machine()]
    if "RANK" not in os.environ:
        show(socket.gethostname(), of_node)
        print("links are measured under torchrun: torchrun --nnodes N --nproc-per-node P -m megatron_zpp doctor")
        return int(any(advice for _, _, advice in of_node))
    from megatron_zpp.parallel.distributed import init_distributed, wait_for_all_ranks  # it needs the extra train

    device = init_distributed(None, 10)
    nodes: list[dict[str, list[Check]]] = [{} for _ in range(dist.get_world_size())]
    is_first_of_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
    dist.all_gather_object(nodes, {socket.gethostname(): of_node} if is_first_of_node else {})
    measured = list(links(device))
    if dist.get_rank() == 0:
        for host, checks in [item for node in nodes for item in node.items()]:
            show(host, checks)
        if measured:
            show("all nodes", measured)
    wait_for_all_ranks(device)
    dist.destroy_process_group()
    return 0


def main() -> int:
    argparse.ArgumentParser(description="Say what nodes lack before a run.", allow_abbrev=False).parse_args()
    return run()
