"""The cluster that a run is planned for: from a word such as 64x8xH100@100, or from a file that measurements filled.

Its nodes may be at several sites, whose link is slower than those between the nodes of one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.files import read_bounded
from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.curves import Curve, check_curves, curve_name, kind_of, seconds_on
from megatron_zpp.planning.hardware import (
    DEFAULT_EFFICIENCY,
    EFFICIENCIES,
    GPUS,
    LATENCY_BETWEEN,
    LATENCY_WITHIN,
    LINK_SHARE,
    MEMORY_SHARE,
)
from megatron_zpp.planning.needs.exchanges import Exchange

WORD = re.compile(r"(?:(?P<sites>\d+)x)?(\d+)x(\d+)x([A-Za-z][\w-]*)@([\d.]+)(?(sites)@([\d.]+))")


def _field(help: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes, GPUs and links, at the rates that they reach. Its fields are the lines of a cluster file."""

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
    overlaps: bool = _field(
        "collectives run beside arithmetic, as with NCCL; gloo's wait, but those between nodes", True
    )
    ring_passes: int = _field("2 where a reduce-scatter is an all-reduce, as gloo's", 1)
    entry_microseconds: float = _field("microseconds that ranks wait for each other at every collective", 0.0)
    layer_microseconds: float = _field("microseconds that the program itself takes for both passes of a layer", 0.0)
    step_microseconds: float = _field("microseconds that it takes for a layer's clipping and optimizer step", 0.0)
    layer_gbytes: float = _field("GB/s of what is between matrix products; 0: as kernel_gbytes", 0.0)
    sites: int = _field("sites that the nodes are divided among", 1)
    site_gbits: float = _field("of several sites: Gbit/s that leave one, all its links together", 0.0)
    site_microseconds: float = _field("microseconds that a hop between sites adds", LATENCY_BETWEEN)
    dollars_per_gpu_hour: float = _field("price, for cost per token; 0: not known", 0.0)
    collective_seconds: Mapping[str, Curve] = dataclasses.field(
        default_factory=dict,
        metadata={"help": "measured by kind, nodes x ranks, and bytes of a piece; links may be slower"},
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | bool | Mapping):
                continue
            may_be_zero = field.name.endswith("microseconds") or field.name in (
                "layer_gbytes",
                "site_gbits",
                "dollars_per_gpu_hour",
            )
            if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                raise ValueError(f"{field.name} is {value}: give a number {'from' if may_be_zero else 'above'} 0")
        if self.nodes % self.sites:
            raise ValueError(f"{self.nodes} nodes do not divide among {self.sites} sites: give each as many")
        if self.sites > 1 and self.site_gbits == 0:
            raise ValueError(f"site_gbits is 0: say what leaves each of the {self.sites} sites")
        check_curves(self.collective_seconds)
        for name in ("efficiency", "attention_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share of the peak, such as 0.5")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def bytes_per_second_of_layers(self) -> float:
        """That what is between matrix products reads and writes."""
        return 1e9 * (self.layer_gbytes or self.kernel_gbytes)

    @property
    def flops_per_second(self) -> float:
        """Of a GPU's matrix products."""
        return self.peak_tflops * 1e12 * self.efficiency

    def seconds_of(self, exchange: Exchange) -> float:
        """How long a collective takes that has its links for itself, and the groups like it on the same nodes.

        One of a kind and on ranks that were measured takes as long as then, or as long as the links between nodes take.
        """
        group = exchange.group
        if group.size == 1 or exchange.nbytes == 0:
            return 0.0
        curve = self.collective_seconds.get(curve_name(kind_of(exchange), group))
        measured = seconds_on(curve, exchange.nbytes) if curve is not None else 0.0
        entry = 1e-6 * self.entry_microseconds
        if curve is not None and group.nodes == 1:
            return entry + measured
        links = exchange.sent * 1e-9 / self.within_gbytes if group.ranks_per_node > 1 and curve is None else 0.0
        if group.nodes > 1:
            groups = self.gpus_per_node / group.ranks_per_node  # that share a node's links
            of_node = groups * exchange.sent_between_nodes / group.nodes * 8e-9 / self.between_gbits
            links = max(links, of_node, exchange.sent * self._seconds_per_byte_between_sites(exchange))
        hops_between, hops_within = group.nodes - 1, group.size - group.nodes
        if exchange.is_straight:  # all at once
            hops_between, hops_within = min(hops_between, 1), min(hops_within, 1)
        latency = hops_between * self.between_microseconds + hops_within * self.within_microseconds
        if group.nodes > 1 and self.sites > 1:
            latency += (1 if exchange.is_straight else self.sites - 1) * self.site_microseconds
        return entry + max(measured, links + exchange.passes * latency * 1e-6)

    def _seconds_per_byte_between_sites(self, exchange: Exchange) -> float:
        """Of the bytes that a rank sends, as far as links between sites set the time. Groups are of ranks of all sites.

        A ring leaves each site once. Of what goes straight to all others, most leaves.
        """
        if self.sites == 1:
            return 0.0
        size = exchange.group.size
        groups = self.world_size / size
        leaving = groups  # rings, each with all the bytes that a rank sends
        if exchange.is_straight:
            leaving = groups * (size / self.sites) * (size - size / self.sites) / (size - 1)
        return leaving * 8e-9 / self.site_gbits


def parse_cluster(word: str) -> ClusterSpec:
    """``NODESxGPUSxKIND@GBITS``, or ``SITESxNODESxGPUSxKIND@GBITS@GBITS``, with the nodes of a site and what leaves one
    last, or the path of a cluster file. Raises ValueError or OSError."""
    match = WORD.fullmatch(word)
    if match is None:
        if Path(word).exists():
            return read_cluster(Path(word))
        raise ValueError(
            f"--cluster {word} is neither a file nor of the form 64x8xH100@100, which is nodes x GPUs of each x their "
            "kind @ Gbit/s out of a node; nor, of several sites, as 2x32x8xH100@400@10, with the sites first, and the "
            "Gbit/s out of one last"
        )
    sites, nodes, gpus, kind, gbits, site_gbits = match.groups()
    if sites is None:
        return default_cluster(int(nodes), int(gpus), kind, float(gbits))
    cluster = default_cluster(int(sites) * int(nodes), int(gpus), kind, float(gbits))
    return dataclasses.replace(cluster, sites=int(sites), site_gbits=LINK_SHARE * float(site_gbits))


def default_cluster(nodes: int, gpus_per_node: int, kind: str, gbits: float) -> ClusterSpec:
    """By data sheets. Raises ValueError for a GPU that is not known."""
    names = {name.lower(): name for name in GPUS}
    name = names.get(kind.lower())
    peak = peak_tflops(kind) if name is not None else None
    if name is None or peak is None:
        raise ValueError(
            f"the GPU {kind} is not known: give one of {', '.join(GPUS)}, or a cluster file by tools/measure_cluster.py"
        )
    gpu = GPUS[name]
    return ClusterSpec(
        nodes,
        gpus_per_node,
        name,
        peak_tflops=peak,
        efficiency=EFFICIENCIES.get(name, DEFAULT_EFFICIENCY),
        attention_efficiency=gpu.attention_efficiency,
        memory_gb=gpu.memory_gb,
        kernel_gbytes=MEMORY_SHARE * gpu.memory_gbytes,
        within_gbytes=LINK_SHARE * gpu.link_gbytes,
        between_gbits=LINK_SHARE * gbits,
    )


def write_cluster(path: Path, cluster: ClusterSpec, said: str = "") -> None:
    """A line for each field, as YAML has them, with what it means. said: comments for the top, without signs."""
    lines = [f"# {line}" for line in said.splitlines()]
    for field in dataclasses.fields(cluster):
        value = getattr(cluster, field.name)
        # JSON is YAML too; of text it would be in quotes.
        typed = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"{field.name}: {typed}  # {field.metadata['help']}")
    path.write_text("\n".join(lines) + "\n")


def read_cluster(path: Path) -> ClusterSpec:
    """What ``write_cluster`` wrote, or somebody by hand. Raises ValueError that names the line."""
    types: dict[Any, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "str": str,
        "bool": {"true": True, "false": False}.__getitem__,
        "Mapping[str, Curve]": json.loads,
    }
    fields = {field.name: field for field in dataclasses.fields(ClusterSpec)}
    values: dict[str, Any] = {}
    for number, line in enumerate(read_bounded(path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or name not in fields or name in values:
            raise ValueError(f"{path}, line {number}: {text!r} is not `name: value` with one of {', '.join(fields)}")
        try:
            values[name] = types[fields[name].type](value)  # annotations are strings here
        except (ValueError, KeyError):
            raise ValueError(f"{path}, line {number}: {name} is {value!r}, give a {fields[name].type}") from None
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING is field.default_factory
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: add a line for each, or let tools/measure_cluster.py")
    try:
        return ClusterSpec(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
