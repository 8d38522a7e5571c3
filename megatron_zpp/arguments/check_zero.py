"""Check ZeRO, ZeRO++, HSDP and Muon against a run's ranks. ``ZeroPPConfig`` checks itself."""

from megatron_zpp.settings.checks import require, require_divides
from megatron_zpp.settings.groups import DistributedSettings, Settings, ZeroSettings
from megatron_zpp.zeropp.config import SUPPORTED_BITS, ZeroPPConfig

_SHARDING = "rank(s) that shard the model"


def check_zero(settings: Settings, fsdp_size: int) -> None:
    """Raise SettingsError unless ``fsdp_size`` ranks, data-parallel * context-parallel ones, can shard a model so."""
    zero, zeropp, distributed = settings.zero, settings.zeropp, settings.distributed
    stage, hpz_size, ranks_per_node = zero.zero_stage, zeropp.hpz_partition_size, zeropp.ranks_per_node
    require_divides("--zero-hpz-partition-size", hpz_size, fsdp_size, _SHARDING)
    require_divides("--zeropp-ranks-per-node", ranks_per_node or 1, fsdp_size, _SHARDING)
    _check_replicas(distributed, zero, zeropp, fsdp_size)
    if distributed.local_nodes > 1:
        ranks = (distributed.local_ranks or 1) // distributed.local_nodes
        per_node = min(fsdp_size, max(1, ranks // distributed.tensor_model_parallel_size))
        expected = f"--zero-hpz-partition-size must be {per_node} or 1, --zeropp-ranks-per-node {per_node} or left out"
        which = f"--local-ranks {distributed.local_ranks} are {ranks} on each node, {per_node} of them data-parallel"
        require(hpz_size in (1, per_node) and ranks_per_node in (None, per_node), f"{which}: {expected}")
    offloads = "--cpu-offload moves shards to host memory, and --zero-stage 0 has none: leave it out, or give 1, 2 or 3"
    require(not zero.cpu_offload or stage >= 1, offloads)
    given = {
        "--zero-quantized-weights": zeropp.quantized_weights,
        "--zero-hpz-partition-size": hpz_size > 1,
        "--zero-quantized-gradients": zeropp.quantized_gradients,
    }
    for flag, is_on in given.items():
        require(not is_on or stage >= 1, f"{flag} needs --zero-stage 1, 2 or 3: stage 0 gathers nothing")


def _check_replicas(distributed: DistributedSettings, zero: ZeroSettings, zeropp: ZeroPPConfig, fsdp_size: int) -> None:
    """Check HSDP, which replaces what ZeRO++ does between nodes."""
    replicas, flag = distributed.num_distributed_optimizer_instances, "--num-distributed-optimizer-instances"
    if replicas == 1:
        return
    require_divides(flag, replicas, fsdp_size, _SHARDING)
    require(zero.zero_stage >= 1, f"{flag} {replicas} replicates shards, and --zero-stage 0 has none; leave one out")
    require(not zeropp.enabled, f"{flag} {replicas} (HSDP) sends nothing in low bits; leave ZeRO++'s flags or it out")
    if zeropp.ranks_per_node is not None:
        check_replicas_on_nodes(replicas, fsdp_size, zeropp.ranks_per_node)


def check_replicas_on_nodes(replicas: int, fsdp_size: int, ranks_per_node: int) -> None:
    """Raise SettingsError if nodes with this number of sharding ranks cut HSDP's replicas unevenly."""
    size = fsdp_size // replicas
    uneven = f"--num-distributed-optimizer-instances {replicas}: replicas of {size} ranks, {ranks_per_node} on a node"
    require(ranks_per_node % size == 0 or size % ranks_per_node == 0, f"{uneven}: one must be a multiple of the other")


def check_muon(settings: Settings) -> None:
    """Raise SettingsError unless ``--optimizer muon`` knows how the run's matrices are laid out."""
    optimizer = settings.optimizer
    if optimizer.optimizer != "muon":
        return
    bits, supported = optimizer.muon_momentum_bits, ", ".join(map(str, SUPPORTED_BITS))
    is_supported = bits is None or bits in SUPPORTED_BITS
    require(is_supported, f"--muon-momentum-bits must be one of {supported}, or left out; got {bits}")
    renewed = "--muon-stale-rows are renewed at every whole step: give a --muon-period above 1, such as 10"
    require(not optimizer.muon_stale_rows or optimizer.muon_period > 1, renewed)
    require(settings.zero.zero_stage >= 1, "--optimizer muon needs --zero-stage 1, 2 or 3, which shard matrices, got 0")
    unsupported = {
        "--tensor-model-parallel-size": settings.distributed.tensor_model_parallel_size > 1,
        "--num-experts": settings.model.num_experts is not None,
        "--cpu-offload": settings.zero.cpu_offload,
    }
    for flag, is_given in unsupported.items():
        require(not is_given, f"--optimizer muon does not support {flag}: leave {flag} out, or use adam")
