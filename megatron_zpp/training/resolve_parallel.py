"""Check how a run's ranks are divided among the kinds of parallelism."""

from __future__ import annotations

import math

from megatron_zpp.training.errors import check_at_least, divisors, flag_of, require
from megatron_zpp.training.settings import DistributedSettings, ModelSettings

_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def check_parallel(distributed: DistributedSettings, zero_stage: int, seq_length: int | None, world_size: int) -> None:
    """Raise SettingsError unless the parallel sizes divide the ranks, and fit together."""
    check_at_least(distributed, 1, *_MODEL_PARALLEL)
    size = distributed.pipeline_model_parallel_size
    require(size == 1, f"--pipeline-model-parallel-size {size} is not supported yet: leave it at 1")
    product = distributed.ranks_per_model_copy
    sizes = " * ".join(f"{flag_of(name)} {getattr(distributed, name)}" for name in _MODEL_PARALLEL)
    require(
        world_size % product == 0,
        f"{sizes} = {product} does not divide the {world_size} rank(s) of this run; choose sizes whose product is one "
        f"of {', '.join(map(str, divisors(world_size)))}",
    )
    require(
        product == 1 or zero_stage > 0,
        f"--zero-stage 0 keeps the whole model on every rank, and {sizes} divides it; use --zero-stage 1",
    )
    _check_context_parallel(distributed.context_parallel_size, seq_length)
    _check_emulation(distributed, zero_stage, world_size)
    require(distributed.distributed_timeout_minutes > 0, "--distributed-timeout-minutes must be positive")


def _check_emulation(distributed: DistributedSettings, zero_stage: int, world_size: int) -> None:
    check_at_least(distributed, 1, "emulate_ranks", "emulate_nodes")
    ranks, nodes = distributed.emulate_ranks, distributed.emulate_nodes
    if ranks is None:
        return
    require(world_size == 1, f"--emulate-ranks {ranks} needs one process, this run has {world_size}: start it alone")
    require(
        ranks % nodes == 0,
        f"--emulate-nodes {nodes} does not divide --emulate-ranks {ranks}; choose one of "
        f"{', '.join(map(str, divisors(ranks)))}",
    )
    require(
        zero_stage in (2, 3),
        f"--emulate-ranks emulates --zero-stage 2 and 3, got {zero_stage}: below 2 each rank keeps its own gradients",
    )


def data_parallel_size(distributed: DistributedSettings, world_size: int) -> int:
    """The number of data-parallel ranks, real or emulated."""
    return (distributed.emulate_ranks or 1) * world_size // distributed.ranks_per_model_copy


def _check_context_parallel(size: int, seq_length: int | None) -> None:
    if size == 1 or seq_length is None:
        return
    fitting = [divisor for divisor in divisors(seq_length) if seq_length % (2 * divisor) == 0] or [1]
    require(
        seq_length % (2 * size) == 0,
        f"--seq-length {seq_length} is not a multiple of 2 * --context-parallel-size {size}: each rank takes two "
        f"of 2 * {size} chunks of a sequence; choose another length, or a --context-parallel-size of "
        f"{', '.join(map(str, fitting))}",
    )


def check_tensor_parallel(distributed: DistributedSettings, model: ModelSettings, seq_length: int) -> None:
    """Raise SettingsError unless heads, MLP and, with sequence parallelism, the sequence can be cut evenly.

    model: completed. The vocabulary waits for the tokenizer: ``check_vocabulary``.
    """
    size = distributed.tensor_model_parallel_size
    cut = {
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_query_groups,
        "--ffn-hidden-size": model.ffn_hidden_size,
    }
    if distributed.sequence_parallel:
        shared = " / --context-parallel-size" if distributed.context_parallel_size > 1 else ""
        cut[f"--seq-length{shared} (cut by --sequence-parallel)"] = seq_length // distributed.context_parallel_size
    numbers = {what: number or 0 for what, number in cut.items()}
    uneven = [f"{what} {number}" for what, number in numbers.items() if number % size]
    require(
        not uneven,
        f"--tensor-model-parallel-size {size} does not divide {', '.join(uneven)}; choose one of "
        f"{', '.join(map(str, divisors(math.gcd(*numbers.values()))))}",
    )


def check_vocabulary(distributed: DistributedSettings, padded_size: int, multiple: int) -> None:
    """Raise SettingsError unless the vocabulary, padded to ``multiple``, can be cut over the tensor-parallel ranks.

    The padding does not depend on their number, as Megatron's does: checkpoints load under any.
    """
    size = distributed.tensor_model_parallel_size
    require(
        padded_size % size == 0,
        f"--tensor-model-parallel-size {size} does not divide the vocabulary of {padded_size}, padded to a multiple of "
        f"{multiple}; give --make-vocab-size-divisible-by {math.lcm(multiple, size)}, or a size that is one of "
        f"{', '.join(map(str, divisors(padded_size)))}",
    )
