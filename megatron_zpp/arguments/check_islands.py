"""Check islands against a run's other settings. ``IslandConfig`` checks itself."""

from collections.abc import Collection

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.islands import IslandConfig
from megatron_zpp.settings.checks import list_divisors, require
from megatron_zpp.settings.flags import iterate_flags
from megatron_zpp.settings.groups import Settings


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
