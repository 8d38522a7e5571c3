"""Complete and check what a run says of ZeRO and ZeRO++."""

from __future__ import annotations

import dataclasses

from megatron_zpp.settings.checks import SettingsError, check_at_least, divisors, flag_of, require
from megatron_zpp.settings.groups import DistributedSettings, ZeroSettings
from megatron_zpp.zeropp.config import LoCoConfig, ZeroPPConfig


def resolve_zero(zero: ZeroSettings, fsdp_size: int, distributed: DistributedSettings) -> ZeroSettings:
    """Completed settings where ``fsdp_size`` ranks, data-parallel * context-parallel ones, shard a model.

    Raises SettingsError.
    """
    require(zero.zero_stage in (0, 1, 2, 3), f"--zero-stage must be 0, 1, 2 or 3, got {zero.zero_stage}")
    for name in ("zero_hpz_partition_size", "zero_ranks_per_node"):
        size = getattr(zero, name)
        require(
            size is None or (size >= 1 and fsdp_size % size == 0),
            f"{flag_of(name)} {size} does not divide the {fsdp_size} rank(s) that shard the model; "
            f"choose one of {', '.join(map(str, divisors(fsdp_size)))}",
        )
    if distributed.emulate_ranks is not None:
        per_node = fsdp_size // distributed.emulate_nodes
        require(
            zero.zero_hpz_partition_size in (1, per_node) and zero.zero_ranks_per_node in (None, per_node),
            f"--emulate-ranks {fsdp_size} on --emulate-nodes {distributed.emulate_nodes} are {per_node} a node: "
            f"--zero-hpz-partition-size must be {per_node} or 1, and --zero-ranks-per-node {per_node} or left out",
        )
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        require(
            not getattr(zero, name) or zero.zero_stage >= 1,
            f"{flag_of(name)} needs --zero-stage 1, 2 or 3: stage 0 shards nothing, so there is nothing to gather",
        )
    require(
        zero.zero_hpz_partition_size == 1 or zero.zero_stage == 3,
        f"--zero-hpz-partition-size needs --zero-stage 3, got {zero.zero_stage}: below it parameters are gathered once "
        "per optimizer step anyway",
    )
    check_at_least(zero, 1, "zero_monitor_interval")
    zero = dataclasses.replace(
        zero,
        **{name: getattr(zero, name) or None for name in _ZERO_MEANS_NONE},  # type: ignore[arg-type]
    )
    zeropp_config(zero)
    return zero


_ZERO_MEANS_NONE = (
    "zero_gradient_bits",
    "zero_weight_intra_bits",
    "zero_weight_block_size",
    "zero_gradient_intra_bits",
    "zero_gradient_block_size",
    "zero_weight_difference_bits",
    "zero_weight_difference_block_size",
    "zeropp_loco_reset_interval",
)


def zeropp_config(zero: ZeroSettings) -> ZeroPPConfig:
    """The settings as ``megatron_zpp.zeropp`` takes them. Raises SettingsError where they do not fit together."""
    try:
        loco = LoCoConfig(
            beta=zero.zeropp_loco_beta,
            reset_interval=zero.zeropp_loco_reset_interval,
            reset=zero.zeropp_loco_reset,
            hops=zero.zeropp_loco_hops,
            error_dtype=zero.zeropp_loco_error_dtype,
        )
        return ZeroPPConfig(
            quantized_weights=zero.zero_quantized_weights,
            hpz_partition_size=zero.zero_hpz_partition_size,
            quantized_gradients=zero.zero_quantized_gradients,
            loco=loco if zero.zeropp_loco else None,
            ranks_per_node=zero.zero_ranks_per_node,
            weight_bits=zero.zero_weight_bits,
            weight_intra_bits=zero.zero_weight_intra_bits,
            weight_block_size=zero.zero_weight_block_size,
            gradient_bits=zero.zero_gradient_bits,
            gradient_intra_bits=zero.zero_gradient_intra_bits,
            gradient_block_size=zero.zero_gradient_block_size,
            weight_rounding=zero.zero_weight_rounding,
            gradient_rounding=zero.zero_gradient_rounding,
            hpz_secondary_dtype=zero.hpz_secondary_dtype,
            weight_difference_bits=zero.zero_weight_difference_bits,
            weight_difference_block_size=zero.zero_weight_difference_block_size,
            hadamard=zero.zero_hadamard,
        )
    except ValueError as error:
        raise SettingsError(f"ZeRO++ settings: {error}") from error
