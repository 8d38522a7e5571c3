"""The cluster that a run is planned for: from a word such as 64x8xH100@100, or from a file that measurements filled.

Where nothing was measured, rates come from data sheets and published measurements.
"""

import bisect
import contextlib
import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.errors import attempt
from megatron_zpp.files import read_text
from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.needs.division import RankGroup
from megatron_zpp.planning.needs.traffic import Exchange

WORD = re.compile(r"(?:(?P<sites>\d+)x)?(\d+)x(\d+)x([A-Za-z][\w-]*)@([\d.]+)(?(sites)@([\d.]+))")


# By the name that users give (the plain one is the SXM version), by data sheets: GB of memory; its GB/s; GB/s to the
# other GPUs of a node in one direction (NVLink or the like, else PCIe). Then shares of the peak that matrix products
# and causal attention reach in a model, as ``benchmarks/planner.py fit`` finds them in published measurements of V100s,
# A100s and H100s. Other versions of a chip take its shares; shares of cards without rows are assumed.
GPUS = {
    "T4": (16, 320, 16, 0.5, 0.2),
    "V100": (32, 900, 150, 0.67, 0.3),
    "A10G": (24, 600, 32, 0.5, 0.2),
    "L4": (24, 300, 32, 0.5, 0.2),
    "L40S": (48, 864, 32, 0.5, 0.2),
    "A100-40GB": (40, 1555, 300, 0.82, 0.33),
    "A100": (80, 2039, 300, 0.82, 0.33),
    "A800": (80, 2039, 200, 0.82, 0.33),
    "H100": (80, 3350, 450, 0.735, 0.183),
    "H100-PCIe": (80, 2000, 64, 0.735, 0.183),
    "H800": (80, 3350, 200, 0.735, 0.183),
    "H200": (141, 4800, 450, 0.735, 0.183),
    "GH200": (96, 4000, 450, 0.735, 0.183),
    "B200": (180, 8000, 900, 0.5, 0.2),
    "MI300X": (192, 5300, 448, 0.5, 0.2),
}
# The program's own microseconds, likewise: for both passes of a layer and micro-batch, and for each expert, which a
# loop computes one after the other.
LAYER_MICROSECONDS, EXPERT_MICROSECONDS = 2270.0, 452.0

# Other programs, likewise: the share of a link's nominal rate, and microseconds of a hop between nodes. Nothing of
# theirs hides behind arithmetic.
LIKE = {"deepspeed": (1.22, 805.0)}

# Share of a link's nominal rate that collectives reach with large messages. Voltage Park measured 323.5 GB/s of
# 8 x 400 Gbit/s with NCCL's all-gather on 4 nodes of 8 H100 (0.81); DeepSpeed 660 of a DGX-2's 800 Gbit/s (0.83).
LINK_SHARE = 0.8
# Microseconds that each hop of a ring adds. NCCL's all-reduce of 1 MiB on 8 B200 takes 51, 14 hops
# (stas00/ml-engineering, network/README.md); between nodes the same page's figures make 29 over EFA, and InfiniBand
# takes a few. A ring's formula explains such measurements only to an order of magnitude.
LATENCY_WITHIN, LATENCY_BETWEEN = 3.6, 10.0
MEMORY_SHARE = 0.7  # assumed share of the memory's bandwidth that kernels reach: norms, quantization, the optimizer

GATHER, REDUCTION, STRAIGHT = "all-gather", "reduction", "all-to-all"  # a reduction that takes two passes

Curve = Mapping[str, float]  # seconds by bytes of a piece; keys are text, as in a file


def curve_name(kind: str, group: RankGroup) -> str:
    return f"{kind} {group.nodes}x{group.ranks_per_node}"


def curve_seconds(curve: Curve, nbytes: int) -> float:
    """Interpolate by a power law; keep the time below the least measured size, and the rate above the largest."""
    points = sorted((int(size), seconds) for size, seconds in curve.items())
    sizes, seconds = zip(*points, strict=True)
    if nbytes <= sizes[0]:
        return seconds[0]
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    above = bisect.bisect_left(sizes, nbytes)
    share = math.log(nbytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
    return seconds[above - 1] ** (1 - share) * seconds[above] ** share


def _field(help: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help}, **more)


# By type of a field: what it wants, and the types that TOML gives it.
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (float, int)),
    bool: ("true or false", (bool,)),
    str: ("text", (str,)),
    Mapping[str, Curve]: ("a table", (dict,)),
}
MAY_BE_ZERO = ("layer_gbytes", "site_gbits", "dollars_per_gpu_hour", "host_gb")


@dataclass(frozen=True)
class Cluster:
    """Nodes, GPUs and links, at the rates that they reach. A cluster file sets these fields."""

    nodes: int = _field("number of nodes")
    gpus_per_node: int = _field("GPUs, or ranks, of each")
    gpu: str = _field("their kind")
    peak_tflops: float = _field("dense 16-bit TFLOP/s of a GPU: what MFU is counted by")
    efficiency: float = _field("share of the peak that matrix products of the model's sizes reach")
    attention_efficiency: float = _field("share of the peak that attention reaches")
    memory_gb: float = _field("GB of a GPU")
    kernel_gbytes: float = _field("GB/s that kernels read and write: quantization, optimizer")
    within_gbytes: float = _field("GB/s that a GPU sends within its node")
    between_gbits: float = _field("Gbit/s that leave a node, all its links together, as collectives reach them")
    within_microseconds: float = _field("microseconds that a hop within a node adds", LATENCY_WITHIN)
    between_microseconds: float = _field("microseconds that a hop between nodes adds", LATENCY_BETWEEN)
    overlaps: bool = _field("ZeRO++'s collectives between nodes run beside arithmetic", True)
    ring_passes: int = _field("2 where a reduce-scatter is an all-reduce, as gloo's", 1)
    entry_microseconds: float = _field("microseconds that ranks wait for each other at every collective", 0.0)
    layer_microseconds: float = _field("microseconds that the program itself takes for both passes of a layer", 0.0)
    expert_microseconds: float = _field("microseconds that it takes for each expert, one after the other", 0.0)
    step_microseconds: float = _field("microseconds that it takes for a layer's clipping and optimizer step", 0.0)
    layer_gbytes: float = _field("GB/s of what is between matrix products; 0: as kernel_gbytes", 0.0)
    sites: int = _field("sites that the nodes are divided among", 1)
    site_gbits: float = _field("of several sites: Gbit/s that leave one, all its links together", 0.0)
    site_microseconds: float = _field("microseconds that a hop between sites adds", LATENCY_BETWEEN)
    host_gbytes: float = _field("GB/s that a GPU reads from host memory; default as PCIe 4", LINK_SHARE * 32)
    host_gb: float = _field("GB of a node's host memory; 0: not known, and not checked", 0.0)
    dollars_per_gpu_hour: float = _field("price, for cost per token; 0: not known", 0.0)
    collective_seconds: Mapping[str, Curve] = _field(
        "measured by kind, nodes x ranks, and bytes of a piece; links may be slower", default_factory=dict
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | bool | Mapping):
                continue
            may_be_zero = field.name.endswith("microseconds") or field.name in MAY_BE_ZERO
            if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                raise ValueError(f"{field.name} is {value}: give a number {'from' if may_be_zero else 'above'} 0")
        if self.nodes % self.sites:
            raise ValueError(f"{self.nodes} nodes do not divide among {self.sites} sites: give each as many")
        if self.sites > 1 and self.site_gbits == 0:
            raise ValueError(f"site_gbits is 0: say what leaves each of the {self.sites} sites")
        for name in ("efficiency", "attention_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share of the peak, such as 0.5")
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            curves = self.collective_seconds.values()
            if all(c and all(int(size) > 0 < seconds < math.inf for size, seconds in c.items()) for c in curves):
                return
        raise ValueError('collective_seconds is not as {"all-gather 2x8": {"4096": 0.0001}}: seconds by kind and bytes')

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def layer_bytes_per_second(self) -> float:
        """Bytes that operations between matrix products read and write."""
        return 1e9 * (self.layer_gbytes or self.kernel_gbytes)

    @property
    def flops_per_second(self) -> float:
        """The rate of a GPU's matrix products."""
        return self.peak_tflops * 1e12 * self.efficiency

    def exchange_seconds(self, exchange: Exchange) -> float:
        """Return how long a collective takes if only it and the equal groups of its nodes use the links.

        If its kind was measured on such ranks, take that time, or the links' between nodes if it is longer.
        """
        group = exchange.group
        if group.size == 1 or exchange.nbytes == 0:
            return 0.0
        kind = STRAIGHT if exchange.is_straight else REDUCTION if exchange.passes == 2 else GATHER
        curve = self.collective_seconds.get(curve_name(kind, group))
        measured = curve_seconds(curve, exchange.nbytes) if curve is not None else 0.0
        entry = 1e-6 * self.entry_microseconds
        if curve is not None and group.nodes == 1:
            return entry + measured
        links = exchange.sent * 1e-9 / self.within_gbytes if group.ranks_per_node > 1 and curve is None else 0.0
        if group.nodes > 1:
            groups = self.gpus_per_node / group.ranks_per_node  # they share a node's links
            node_seconds = groups * exchange.sent_between_nodes / group.nodes * 8e-9 / self.between_gbits
            links = max(links, node_seconds)
            if self.sites > 1:
                leaving = self.world_size / group.size  # rings; each leaves a site once, with all that a rank sends
                if exchange.is_straight:
                    per_site = group.size / self.sites
                    leaving = leaving * per_site * (group.size - per_site) / (group.size - 1)
                links = max(links, exchange.sent * (leaving * 8e-9 / self.site_gbits))
        hops_between, hops_within = group.nodes - 1, group.size - group.nodes
        if exchange.is_straight:  # all at once
            hops_between, hops_within = min(hops_between, 1), min(hops_within, 1)
        latency = hops_between * self.between_microseconds + hops_within * self.within_microseconds
        if group.nodes > 1 and self.sites > 1:
            latency += (1 if exchange.is_straight else self.sites - 1) * self.site_microseconds
        return entry + max(measured, links + exchange.passes * latency * 1e-6)


def parse_cluster(word: str) -> Cluster:
    """Read ``NODESxGPUSxKIND@GBITS``, ``SITESxNODESxGPUSxKIND@GBITS@GBITS`` or the path of a cluster file.

    With sites, NODES counts one site's, and the last number is what leaves a site. Raises ValueError or OSError.
    """
    match = WORD.fullmatch(word)
    if match is None:
        if Path(word).exists():
            return read_cluster(Path(word))
        form = "64x8xH100@100 (nodes x GPUs x kind @ Gbit/s out of a node), or 2x32x8xH100@400@10 of several sites"
        raise ValueError(f"--cluster {word} is neither a file nor of the form {form}")
    sites, nodes, gpus, kind, gbits, site_gbits = match.groups()
    cluster = default_cluster(int(sites or 1) * int(nodes), int(gpus), kind, float(gbits))
    if sites is None:
        return cluster
    return dataclasses.replace(cluster, sites=int(sites), site_gbits=LINK_SHARE * float(site_gbits))


def default_cluster(nodes: int, gpus_per_node: int, kind: str, gbits: float) -> Cluster:
    """Describe a cluster by data sheets. Raises ValueError for a GPU that is not known."""
    name = next((name for name in GPUS if name.lower() == kind.lower()), None)
    peak = peak_tflops(kind) if name is not None else None
    if name is None or peak is None:
        raise ValueError(f"the GPU {kind} is not known: give one of {', '.join(GPUS)}, or a file of plan --measure")
    memory_gb, memory_gbytes, link_gbytes, efficiency, attention_efficiency = GPUS[name]
    return Cluster(
        nodes,
        gpus_per_node,
        name,
        peak_tflops=peak,
        efficiency=efficiency,
        attention_efficiency=attention_efficiency,
        memory_gb=memory_gb,
        kernel_gbytes=MEMORY_SHARE * memory_gbytes,
        within_gbytes=LINK_SHARE * link_gbytes,
        between_gbits=LINK_SHARE * gbits,
        layer_microseconds=LAYER_MICROSECONDS,
        expert_microseconds=EXPERT_MICROSECONDS,
    )


def like_program(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster as the program ``name`` of ``LIKE`` uses it."""
    share, microseconds = LIKE[name]
    gbits = share / LINK_SHARE * cluster.between_gbits
    return dataclasses.replace(cluster, overlaps=False, between_gbits=gbits, between_microseconds=microseconds)


def write_cluster(path: Path, cluster: Cluster, comments: str = "") -> None:
    """Write a TOML file with a line and an explanation for each field, below ``comments``."""
    lines = [f"# {line}" for line in comments.splitlines()]
    for field in dataclasses.fields(cluster):
        if not isinstance(value := getattr(cluster, field.name), Mapping):
            lines.append(f"{field.name} = {json.dumps(value)}  # {field.metadata['help']}")
    for name, curve in cluster.collective_seconds.items():
        lines += [f'[collective_seconds."{name}"]', *(f"{size} = {seconds!r}" for size, seconds in curve.items())]
    with attempt("write the cluster to", path):
        path.write_text("\n".join(lines) + "\n")


def read_cluster(path: Path) -> Cluster:
    """Read a file by ``write_cluster`` or by hand. Raises ValueError that says what is wrong in it."""
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    required = [name for name, f in fields.items() if f.default is dataclasses.MISSING is f.default_factory]
    try:
        values = tomllib.loads(read_text(path))
        for name, value in values.items():
            if name not in fields:
                raise ValueError(f"a cluster file has no field {name}: give {', '.join(fields)}")
            wanted, types = _KINDS[fields[name].type]
            if type(value) not in types:
                raise ValueError(f"{name} is {json.dumps(value, default=str)}: give {wanted}")
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"{', '.join(missing)} missing: add a line for each, or run plan --measure again")
        return Cluster(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
