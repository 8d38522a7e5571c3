"""``megatron-zpp doctor``: say what a node lacks before a run; under torchrun, of all nodes, and with their links."""

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

from megatron_zpp.errors import reports_errors
from megatron_zpp.zeropp.fsdp.topology import build_topology
from megatron_zpp.zeropp.wire import kernels

Check = tuple[str, str, str]  # what, what was found, what to do about it: empty if nothing

SHARED_MEMORY, OPEN_FILES, CORES_PER_GPU = 2**30, 4096, 4  # less than this deserves a look
INFINIBAND = Path("/sys/class/infiniband")
LINK_SECONDS = 1.0  # a collective that takes longer is the largest one measured


def check(what: str, found: str, is_well: bool, advice: str) -> Check:
    return what, found, "" if is_well else advice


def software() -> Iterator[Check]:
    needs = requires("megatron_zpp") or []
    wanted = next(need for need in needs if need.startswith("torch"))
    bounds = [tuple(map(int, version.split("."))) for version in re.findall(r"[\d.]+", wanted)]
    fits = min(bounds) <= tuple(map(int, torch.__version__.split(".")[:2])) < max(bounds)
    yield check("torch", torch.__version__, fits, f"install {wanted}")
    reason = kernels.why_not_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    yield "kernels", "plain torch, several times slower" if reason else "compiled", reason or ""
    of_trainer = sorted(re.split(r"\W", need)[0] for need in needs if need.endswith('extra == "train"'))
    missing = ", ".join(name for name in of_trainer if importlib.util.find_spec(name) is None)
    found = f"without {missing}" if missing else "there"
    yield check("trainer's packages", found, not missing, "install the extra train")


def gpus() -> Iterator[Check]:
    count, has_driver = torch.cuda.device_count(), shutil.which("nvidia-smi") is not None
    if count == 0:
        built_for = torch.version.cuda
        too_old = f"torch was built for CUDA {built_for} and finds no device: is the driver too old?"
        advice = too_old if built_for else "this torch is a CPU build: install one for CUDA"
        yield check("GPUs", "none", not has_driver, advice)
        return
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    found = f"{count} x {', '.join(sorted(names))}"
    yield check("GPUs", found, len(names) == 1, "ranks are as fast as the slowest")
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none", ""
    fabric = ", ".join(sorted(path.name for path in INFINIBAND.glob("*")))
    yield check("InfiniBand", fabric or "none", bool(fabric), "NCCL uses TCP: NCCL_SOCKET_IFNAME names the link")
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    advice = "unset it: all streams share one queue, and nothing overlaps"
    yield check("CUDA_DEVICE_MAX_CONNECTIONS", queues, queues != "1", advice)
    allocator, expandable = os.environ.get("PYTORCH_ALLOC_CONF", "not set"), "expandable_segments:True"
    advice = f"memory is lost to gaps between units of other sizes: set it to {expandable}"
    yield check("PYTORCH_ALLOC_CONF", allocator, expandable in allocator, advice)


def machine() -> Iterator[Check]:
    cores, count = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    advice = f"fewer than {CORES_PER_GPU} for each GPU: loaders will be slow"
    yield check("CPU cores", str(cores), cores >= CORES_PER_GPU * count, advice)
    shared = shutil.disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else 0
    advice = "too small for data workers and NCCL: docker run --shm-size 8g, or --ipc=host"
    yield check("/dev/shm", f"{shared / 2**30:.1f} GiB", shared >= SHARED_MEMORY, advice)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield check("open files", str(files), files >= OPEN_FILES or files < 0, f"raise it: ulimit -n {OPEN_FILES}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if locked < 0 else f"{locked / 2**20:.0f} MiB"
    yield check("locked memory", found, locked < 0 or not INFINIBAND.exists(), "InfiniBand needs ulimit -l unlimited")
    host, is_alone = socket.gethostname(), int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        yield "host name", f"{host}: {error}", "add it to /etc/hosts: gloo looks it up"
    else:
        advice = "other nodes cannot reach this address: set GLOO_SOCKET_IFNAME"
        yield check("host name", f"{host} is {address}", is_alone or not address.startswith("127."), advice)


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


@reports_errors
def main() -> int:
    """Print the checks. Return 1 if something deserves a look on this node; under torchrun 0."""
    argparse.ArgumentParser(description="Say what nodes lack before a run.", allow_abbrev=False).parse_args()
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
