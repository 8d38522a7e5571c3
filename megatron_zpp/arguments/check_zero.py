"""Check what a run says of ZeRO and ZeRO++ against its ranks. ``ZeroPPConfig`` checks itself."""

from __future__ import annotations

from megatron_zpp.settings.checks import divisors, require
from megatron_zpp.settings.groups import DistributedSettings, ZeroSettings
from megatron_zpp.zeropp.config import ZeroPPConfig


def check_zero(zero: ZeroSettings, zeropp: ZeroPPConfig, fsdp_size: int, distributed: DistributedSettings) -> None:
    """Raise SettingsError unless ``fsdp_size`` ranks, data-parallel * context-parallel ones, can shard a model so."""
    stage, hpz_size, ranks_per_node = zero.zero_stage, zeropp.hpz_partition_size, zeropp.ranks_per_node
    for flag, size in ("--zero-hpz-partition-size", hpz_size), ("--zeropp-ranks-per-node", ranks_per_node):
        require(
            size is None or fsdp_size % size == 0,
            f"{flag} {size} does not divide the {fsdp_size} rank(s) that shard the model; "
            f"choose one of {', '.join(map(str, divisors(fsdp_size)))}",
        )
    _check_replicas(distributed, zero, zeropp, fsdp_size)
    if distributed.emulate_ranks is not None:
        require(
            not zeropp.check_agreement,
            "--zeropp-check-agreement compares real ranks, and emulated ones are one process: leave it out",
        )
        ranks, nodes = distributed.emulate_ranks, distributed.emulate_nodes
        per_node = ranks // nodes
        require(
            hpz_size in (1, per_node) and ranks_per_node in (None, per_node),
            f"--emulate-ranks {ranks} on --emulate-nodes {nodes} are {per_node} a node: "
            f"--zero-hpz-partition-size must be {per_node} or 1, and --zeropp-ranks-per-node {per_node} or left out",
        )
    require(
        not zero.cpu_offload or (stage >= 1 and distributed.emulate_ranks is None),
        "--cpu-offload moves the shards of real ranks at --zero-stage 1, 2 or 3 to host memory; leave it out",
    )
    for flag, is_on in (
        ("--zero-quantized-weights", zeropp.quantized_weights),
        ("--zero-quantized-gradients", zeropp.quantized_gradients),
    ):
        require(
            not is_on or stage >= 1,
            f"{flag} needs --zero-stage 1, 2 or 3: stage 0 shards nothing, so there is nothing to gather",
        )
    require(
        hpz_size == 1 or stage == 3,
        f"--zero-hpz-partition-size needs --zero-stage 3, got {stage}: below it parameters are gathered once "
        "per optimizer step anyway",
    )


def _check_replicas(distributed: DistributedSettings, zero: ZeroSettings, zeropp: ZeroPPConfig, fsdp_size: int) -> None:
    """HSDP replaces what ZeRO++ does between nodes, and its shards must lie on nodes alike."""
    replicas = distributed.num_distributed_optimizer_instances
    if replicas == 1:
        return
    given = f"--num-distributed-optimizer-instances {replicas}"
    require(
        fsdp_size % replicas == 0,
        f"{given} does not divide the {fsdp_size} rank(s) that shard the model; choose one of "
        f"{', '.join(map(str, divisors(fsdp_size)))}",
    )
    require(zero.zero_stage >= 1, f"{given} divides those who share shards, and --zero-stage 0 has none; leave one out")
    require(distributed.emulate_ranks is None, f"{given} cannot be emulated; leave --emulate-ranks or it out")
    require(
        not zeropp.enabled,
        f"{given} (HSDP) sends nothing in low bits; leave it out, or --zero-quantized-weights, "
        "--zero-hpz-partition-size and --zero-quantized-gradients",
    )
    if zeropp.ranks_per_node is not None:
        check_replicas_on_nodes(replicas, fsdp_size, zeropp.ranks_per_node)


def check_replicas_on_nodes(replicas: int, fsdp_size: int, ranks_per_node: int) -> None:
    """Raise SettingsError if nodes with this number of sharding ranks cut HSDP's replicas unevenly."""
    size = fsdp_size // replicas
    require(
        ranks_per_node % size == 0 or size % ranks_per_node == 0,
        f"--num-distributed-optimizer-instances {replicas} makes replicas of {size} ranks, and nodes have "
        f"{ranks_per_node}: choose a number that makes one a multiple of the other, such as that of the nodes, "
        f"{fsdp_size // ranks_per_node}",
    )
