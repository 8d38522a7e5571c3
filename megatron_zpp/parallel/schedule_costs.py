"""What a pipeline's schedule keeps in memory, and how long it leaves its ranks idle, by formula.

m micro-batches, p pipeline ranks with v stages each. Narayanan et al., "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM", 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from megatron_zpp.parallel.stages import Placement


def micro_batches_kept(schedule: str, placement: Placement, rank: int, micro_batches: int) -> float:
    """Micro-batches of which a pipeline rank keeps the activations of all its layers at once, at most."""
    ranks = max(placement.ranks) + 1
    stages = placement.num_stages // ranks
    if schedule == "gpipe":
        return micro_batches
    if schedule == "zbv":
        return min(micro_batches, ranks)
    if schedule == "1f1b":
        return min(micro_batches, ranks - rank)
    # Forward passes of stages before the first backward pass, as Interleaved1F1B has them.
    return min(micro_batches, (2 * (ranks - rank - 1) + (stages - 1) * ranks + 1) / stages)


def idle_micro_batches(schedule: str, placement: Placement) -> float:
    """How long each rank has nothing to do in a step, in the time of one micro-batch on its stages."""
    ranks = max(placement.ranks) + 1
    stages = placement.num_stages // ranks
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    if schedule == "interleaved":
        return (ranks - 1) / stages
    # Backward passes in two parts of about a forward pass each fill two thirds of it.
    return (ranks - 1) / (3 * stages)
