"""What a run is, in a few lines at its start."""

from __future__ import annotations

import torch

from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.run import Run

# A plain Megatron script has no --zero-stage, and would keep all of these whole on each data-parallel rank.
_SHARDED = (
    "data-parallel ranks shard nothing, as Megatron without --use-distributed-optimizer",
    "data-parallel ranks shard optimizer state, as Megatron with --use-distributed-optimizer",
    "data-parallel ranks shard gradients and optimizer state",
    "data-parallel ranks shard parameters, gradients and optimizer state, unless --zero-stage says 0, 1 or 2",
)


def describe(run: Run) -> None:
    """Print it, on rank 0."""
    zeropp, world_size = run.zeropp, run.world_size
    ranks = ("emulated rank" if run.mesh.emulated_ranks > 1 else "rank") + ("s" if world_size > 1 else "")
    print_once(
        f"{run.architecture.name} with {run.architecture.num_parameters(run.model.config):,} parameters, ZeRO stage "
        f"{run.settings.zero.zero_stage} on {world_size} {ranks} ({run.device.type}, torch "
        f"{torch.__version__})"
    )
    if world_size > 1:
        print_once(_SHARDED[run.settings.zero.zero_stage])
    if run.pipeline is not None:
        print_once(run.pipeline.describe())
    if zeropp is not None and world_size > 1:
        print_once(zeropp.describe())
    if run.has_islands:
        print_once(run.islands.describe())
    if run.leaving is not None:
        print_once(f"this is island {run.mesh.job}, a job of its own: the others may leave")
