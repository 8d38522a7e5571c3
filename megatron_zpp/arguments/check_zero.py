"""Check what a run says of ZeRO and ZeRO++ against its ranks. ``ZeroPPConfig`` checks itself."""

from __future__ import annotations

from megatron_zpp.settings.checks import divisors, require
from megatron_zpp.settings.groups import DistributedSettings, ZeroSettings
from megatron_zpp.zeropp.config import ZeroPPConfig


def check_zero(zero: ZeroSettings, zeropp: ZeroPPConfig, fsdp_size: int, distributed: DistributedSettings) -> None:
    """Raise SettingsError unless ``fsdp_size`` ranks, data-parallel * context-parallel ones, can shard a model so."""
    stage, hpz_size, ranks_per_node = zero.zero_stage, zeropp.hpz_partition_size, zeropp.ranks_per_node
    for flag, size in ("--zero-hpz-partition-size", hpz_size), ("--zero-ranks-per-node", ranks_per_node):
        require(
            size is None or fsdp_size % size == 0,
            f"{flag} {size} does not divide the {fsdp_size} rank(s) that shard the model; "
            f"choose one of {', '.join(map(str, divisors(fsdp_size)))}",
        )
    if distributed.emulate_ranks is not None:
        per_node = fsdp_size // distributed.emulate_nodes
        require(
            hpz_size in (1, per_node) and ranks_per_node in (None, per_node),
            f"--emulate-ranks {fsdp_size} on --emulate-nodes {distributed.emulate_nodes} are {per_node} a node: "
            f"--zero-hpz-partition-size must be {per_node} or 1, and --zero-ranks-per-node {per_node} or left out",
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
