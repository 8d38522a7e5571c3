"""Check how a run's ranks are divided among the kinds of parallelism."""

from __future__ import annotations

import math

from megatron_zpp.training.errors import check_at_least, divisors, flag_of, require
from megatron_zpp.training.settings import DistributedSettings, ModelSettings

_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def check_parallel(distributed: DistributedSettings, zero_stage: int, world_size: int) -> None:
    """Raise SettingsError unless the parallel sizes divide the ranks, and fit together."""
    check_at_least(distributed, 1, *_MODEL_PARALLEL)
    for name in _MODEL_PARALLEL[1:]:
        size = getattr(distributed, name)
        require(size == 1, f"{flag_of(name)} {size} is not supported yet: leave it at 1; ZeRO-3 shards over all ranks")
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
    require(distributed.distributed_timeout_minutes > 0, "--distributed-timeout-minutes must be positive")


def check_tensor_parallel(
    distributed: DistributedSettings, model: ModelSettings, seq_length: int, compiles: bool
) -> None:
    """Raise SettingsError unless heads, MLP and, with sequence parallelism, the sequence can be cut evenly.

    model: completed. The vocabulary waits for the tokenizer: ``check_vocabulary``.
    """
    size = distributed.tensor_model_parallel_size
    require(
        size == 1 or not compiles,
        f"--compile is not supported with --tensor-model-parallel-size {size} yet: leave one of them out",
    )
    cut = {
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_query_groups,
        "--ffn-hidden-size": model.ffn_hidden_size,
    }
    if distributed.sequence_parallel:
        cut["--seq-length (cut by --sequence-parallel)"] = seq_length
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
