"""Which data-parallel ranks share a node: N nodes x P ranks, rank r = n * P + p."""

import ctypes
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

T = TypeVar("T")

# By process group: the groups of some of its ranks. Models that are sharded over one group share them.
_SUBGROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Topology:
    """The two levels of one FSDP process group, as this rank sees them.

    ``intra_group`` holds the P ranks of this node, ``inter_group`` the N ranks with this local rank p, in node order.
    ``reduce_group`` holds the ranks of ``intra_group`` again. With NCCL it is a second communicator, so that a layer's
    gather does not wait for another layer's reduction; so is ``inter_group`` where it holds all ranks of ``group``.
    """

    num_nodes: int  # N
    ranks_per_node: int  # P
    rank: int
    group: dist.ProcessGroup
    intra_group: dist.ProcessGroup
    inter_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """n of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """p of this rank."""
        return self.rank % self.ranks_per_node


def process_rank() -> int:
    """Return this process's rank in torch's default process group; 0 if there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def build_topology(group: dist.ProcessGroup, ranks_per_node: int | None = None) -> Topology:
    """Split ``group`` into nodes of ``ranks_per_node`` consecutive ranks; None = as the ranks run.

    Collective over ``group``. Raises ValueError on every rank when the nodes are unequal, interleaved, or smaller
    than ``ranks_per_node``.
    """
    ranks_per_node = _ranks_per_node_of(gather_node_names(group), ranks_per_node)
    members = dist.get_process_group_ranks(group)  # global ranks, in group order
    num_nodes, rank = len(members) // ranks_per_node, group.rank()
    node, local_rank = divmod(rank, ranks_per_node)
    runs_in_order = _runs_in_order(group)
    in_node = members[node * ranks_per_node : (node + 1) * ranks_per_node]
    return Topology(
        num_nodes,
        ranks_per_node,
        rank,
        group,
        intra_group=_subgroup(group, in_node),
        inter_group=_subgroup(group, members[local_rank::ranks_per_node], is_second=runs_in_order),
        reduce_group=_subgroup(group, in_node, is_second=runs_in_order),
    )


def _runs_in_order(group: dist.ProcessGroup) -> bool:
    """Return whether collectives of one group wait for each other, as NCCL's do."""
    # Not its one backend: groups made with no name, or with "cpu:gloo,cuda:nccl", have one for each kind of device.
    return "nccl" in dist.get_backend_config(group)


def _subgroup(group: dist.ProcessGroup, ranks: list[int], is_second: bool = False) -> dist.ProcessGroup:
    """Return the group of ``ranks``, or with ``is_second`` another group of them."""
    if len(ranks) == group.size() and not is_second:
        return group
    known, key = _SUBGROUPS.setdefault(group, {}), (is_second, *ranks)
    if key in known:
        return known[key]
    # Only the members call: other FSDP groups (of other tensor- or pipeline-parallel ranks) know nothing of this one.
    has_nccl, of_nccl = "nccl" in dist.get_backend_config(group), None
    options = group._get_backend(torch.device("cuda" if has_nccl else "cpu")).options
    # new_group would take the default's. A fake group, which counts launches, has no options.
    timeout = options._timeout if options is not None else None
    if has_nccl:
        # FSDP2's collectives run on its streams of high priority, ours that are in flight on a stream of their group.
        of_nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        of_nccl._timeout = timeout
    # Where a program bound the world to a device, NCCL would split its communicator, which all its ranks must join.
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        known[key] = dist.new_group(
            ranks, timeout, dist.get_backend(group), pg_options=of_nccl, use_local_synchronization=True
        )
    finally:
        world.bound_device_id = bound
    return known[key]


def ranks_per_node_of_part(part: dist.ProcessGroup, whole: dist.ProcessGroup, ranks_per_node: int) -> int:
    """Return how many ranks of ``part`` a node has, if it has ``ranks_per_node`` consecutive ones of ``whole``.

    A group that is not a subset of ``whole`` is treated like it. Raises ValueError where nodes have unequal parts.
    """
    positions = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(whole))}
    members = dist.get_process_group_ranks(part)
    if not positions.keys() >= set(members):
        return ranks_per_node
    nodes = [positions[rank] // ranks_per_node for rank in members]
    per_node = nodes.count(nodes[0])
    if any(nodes.count(node) != per_node for node in nodes):
        raise ValueError(
            f"{ranks_per_node} data-parallel ranks per node divide the {len(members)} ranks of some units unevenly: "
            f"they are on nodes {', '.join(map(str, nodes))}; choose sizes of which one is a multiple of the other"
        )
    return per_node


def gather_node_names(group: dist.ProcessGroup) -> list[str]:
    """Return where each rank of ``group`` runs: equal names for ranks of one node. Collective."""
    # torchrun numbers its agents, one per node, in GROUP_RANK; other launchers (srun) leave the host's name.
    return gather_objects(f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}", group)


def gather_objects(local: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather what every rank of ``group`` (default: all) passed as ``local``, in rank order. Collective.

    torch's ``all_gather_object`` reads tensors through NumPy, which torch does not install.
    """
    ranks, device = dist.get_world_size(group), dist.distributed_c10d._get_object_coll_device(group)
    pickled = pickle.dumps(local)
    sizes = torch.empty(ranks, 1, dtype=torch.int64, device=device)
    dist.all_gather([*sizes], torch.tensor([len(pickled)], device=device), group=group)
    largest = int(sizes.max())
    padded = torch.frombuffer(bytearray(pickled.ljust(largest, b"\0")), dtype=torch.uint8).to(device)
    gathered = torch.empty(ranks, largest, dtype=torch.uint8, device=device)
    dist.all_gather([*gathered], padded, group=group)
    return [pickle.loads(ctypes.string_at(row.data_ptr(), largest)) for row in gathered.cpu()]


def _ranks_per_node_of(names: Sequence[str], stated: int | None = None) -> int:
    """Return P, by the node name of each rank in group order, or as stated, if whole nodes have P consecutive ranks."""
    per_node, ranks = stated or names.count(names[0]), {name: names.count(name) for name in names}
    parts = [names[start : start + per_node] for start in range(0, len(names), per_node)]
    is_even = all(len(part) == per_node and len({*part}) == 1 for part in parts)
    if not is_even or (stated is None and {*ranks.values()} != {per_node}):
        raise ValueError(
            f"the data-parallel ranks are not split evenly over nodes in consecutive runs of {per_node} (ranks on each "
            f"node: {ranks}); start the same number on every node, or set ranks per node that divide a node's"
        )
    return per_node
