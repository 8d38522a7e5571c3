"""Check ZeRO, ZeRO++, HSDP, Muon and islands against a run's other settings. The library's configs check themselves."""

from collections.abc import Collection

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.islands import IslandConfig
from megatron_zpp.settings.checks import list_divisors, require, require_divides
from megatron_zpp.settings.flags import iterate_flags
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


def check_islands(settings: Settings, given: Collection[str]) -> None:
    """Raise SettingsError where something else does not go with islands. given: settings that the user chose."""
    ranks, config, training = settings.distributed, settings.island, settings.training
    if ranks.islands == 1:
        for flag in iterate_flags(IslandConfig):
            require(flag.setting not in given, f"{flag.name} needs --islands above 1")
        return
    islands, nodes = f"--islands {ranks.islands}", ranks.local_nodes
    uneven = f"{islands} of whole nodes do not divide --local-nodes {nodes}; choose one of {list_divisors(nodes)}"
    require(nodes == 1 or nodes % ranks.islands == 0, uneven)
    require(settings.zero.zero_stage > 0, f"{islands} exchange shards, and --zero-stage 0 has none: give 1, 2 or 3")
    unsupported = {
        "--num-distributed-optimizer-instances (HSDP) would send each shard once per replica": (
            ranks.num_distributed_optimizer_instances > 1
        ),
        "--calculate-per-token-loss, as in --sft, weighs ranks by the tokens of all": training.calculate_per_token_loss,
        "--loss-spike-factor compares the loss of all ranks at every step": training.loss_spike_factor is not None,
        "--publish has the weights of one model": settings.checkpoint.publish is not None,
        "--moe-router-enable-expert-bias keeps equal biases on all ranks": settings.model.moe_router_enable_expert_bias,
    }
    for reason, is_given in unsupported.items():
        require(not is_given, f"{reason}, which does not work with {islands}: leave one out")
    try:
        placement = placement_of(ranks, settings.model.num_layers or 1)
    except ValueError:  # the pipeline's own check reports it
        return
    stages_of_ranks = [placement.stages_of(rank) for rank in range(ranks.pipeline_model_parallel_size)]
    fewest = min(sum(len(placement.layers[stage]) for stage in stages) for stages in stages_of_ranks)
    most = f"--island-fragments {config.fragments} are more than the {fewest} layer(s) of a rank: give at most {fewest}"
    require(config.fragments <= fewest, most)
