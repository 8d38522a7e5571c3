"""Check what a run says of islands. ``IslandConfig`` checks itself."""

from __future__ import annotations

from collections.abc import Collection

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.islands import IslandConfig
from megatron_zpp.settings.checks import divisors, flag_of, require
from megatron_zpp.settings.flags import iterate_flags
from megatron_zpp.settings.groups import Settings


def check_islands(settings: Settings, given: Collection[str]) -> None:
    """Raise SettingsError where something else does not go with islands. ``check_parallel`` has checked their number.

    given: names of the settings that the user chose.
    """
    ranks, config = settings.distributed, settings.island
    if ranks.islands == 1:
        require(not ranks.islands_may_leave, "--islands-may-leave needs --islands above 1: how many begin the run")
        for flag in iterate_flags(IslandConfig):
            require(flag.setting not in given, f"{flag.name} needs --islands above 1")
        return
    islands = f"--islands {ranks.islands}"
    nodes = ranks.emulate_nodes
    require(
        ranks.emulate_ranks is None or nodes % ranks.islands == 0,
        f"{islands} are of whole nodes, and --emulate-nodes {nodes} is no multiple: give one of "
        f"{', '.join(map(str, divisors(nodes)))} islands, or other nodes",
    )
    require(settings.zero.zero_stage > 0, f"{islands} exchange shards, and --zero-stage 0 has none: give 1, 2 or 3")
    require(
        ranks.num_distributed_optimizer_instances == 1,
        f"{islands} would send each shard once for every replica of --num-distributed-optimizer-instances (HSDP): "
        "leave one out",
    )
    require(
        not settings.training.calculate_per_token_loss,
        f"--calculate-per-token-loss weighs ranks by the tokens of all, which {islands} do not know: leave one out",
    )
    require(
        settings.training.loss_spike_factor is None,
        f"--loss-spike-factor compares the loss of all ranks at every step, which {islands} know now and then: leave "
        "one out",
    )
    require(
        not settings.model.moe_router_enable_expert_bias,
        f"--moe-router-enable-expert-bias keeps biases that {islands} would not synchronize: leave one out",
    )
    if ranks.islands_may_leave:
        _check_elastic_islands(settings)
    try:
        placement = placement_of(ranks, settings.model.num_layers or 1)
    except ValueError:  # which the pipeline's own check says
        return
    stages_of_ranks = [placement.stages_of(rank) for rank in range(ranks.pipeline_model_parallel_size)]
    fewest = min(sum(len(placement.layers[stage]) for stage in stages) for stages in stages_of_ranks)
    require(
        config.fragments <= fewest,
        f"{flag_of('island_fragments')} {config.fragments} are more than the {fewest} layer(s) of a rank: give at most "
        f"{fewest}",
    )


def _check_elastic_islands(settings: Settings) -> None:
    """Raise SettingsError if this job cannot be an elastic island."""
    ranks, config, training, checkpoint = settings.distributed, settings.island, settings.training, settings.checkpoint
    number = ranks.island_number
    require(number is not None, f"which island is this job? give --island-number, from 0 to {ranks.islands - 1}")
    require(
        number is None or number < ranks.islands,
        f"--island-number {number} must be below --islands {ranks.islands}: they count from 0",
    )
    require(
        ranks.island_lighthouse is not None and ranks.island_secret_file is not None,
        "how do islands find and trust each other? start megatron-zpp lighthouse, and give --island-lighthouse "
        "host:29510 and --island-secret-file FILE (docs/islands.md)",
    )
    require(
        config.fragments == 1 and config.sync_delay == 0,
        "--island-fragments and --island-sync-delay keep parameters in flight, which an island that leaves would take "
        "along: leave them or --islands-may-leave out",
    )
    require(
        not training.skip_train,
        "--skip-train needs no other island: leave --islands-may-leave and --islands out, and --load the folder of one",
    )
    require(
        not checkpoint.override_batch_size,
        "--override-batch-size: islands tell by their steps alone which samples are read, so all steps must have the "
        "batch size of the flags; leave it or --islands-may-leave out",
    )
    intervals = {"--save-interval": checkpoint.save_interval, "--exit-interval": training.exit_interval}
    for flag, interval in intervals.items():
        require(
            interval is None or interval % config.sync_interval == 0,
            f"{flag} {interval} must be a multiple of --island-sync-interval {config.sync_interval} with "
            "--islands-may-leave: a run resumes from the islands' last synchronization",
        )
