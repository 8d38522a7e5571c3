"""Check how a run's ranks are divided among the kinds of parallelism."""

import dataclasses
import math

from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.parallel.mesh import MODEL_PARALLEL_SETTINGS, ranks_per_model_copy
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD, check_micro_batches
from megatron_zpp.parallel.stages import Placement, place_stages
from megatron_zpp.settings.checks import SettingsError, divisors, flag_of, list_divisors, require, require_divides
from megatron_zpp.settings.groups import DistributedSettings, Settings, ZeroSettings


def check_parallel(distributed: DistributedSettings, seq_length: int | None, world_size: int) -> None:
    """Raise SettingsError unless the parallel sizes divide the ranks, and fit together."""
    product = ranks_per_model_copy(distributed)
    sizes = " * ".join(f"{flag_of(name)} {getattr(distributed, name)}" for name in MODEL_PARALLEL_SETTINGS)
    uneven = f"{sizes} = {product} does not divide the {world_size} rank(s) of this run"
    require(world_size % product == 0, f"{uneven}; choose sizes whose product is one of {list_divisors(world_size)}")
    dp_size, cp_size = data_parallel_size(distributed, world_size), distributed.context_parallel_size
    require_divides("--islands", distributed.islands, dp_size, "data-parallel rank(s)")
    if cp_size > 1 and seq_length is not None:
        fitting = [size for size in divisors(seq_length) if seq_length % (2 * size) == 0] or [1]
        uneven = f"--seq-length {seq_length} is not a multiple of 2 * --context-parallel-size {cp_size}"
        choose = f"choose another length, or a --context-parallel-size of {', '.join(map(str, fitting))}"
        require(seq_length % (2 * cp_size) == 0, f"{uneven}; {choose}")
    ranks, nodes = distributed.local_ranks, distributed.local_nodes
    if ranks is not None:
        others = f"--local-ranks {ranks} starts its ranks by itself, and this run has {world_size}"
        require(world_size == ranks, f"{others}: leave it out, or start the command without a launcher")
        uneven = f"--local-nodes {nodes} does not divide --local-ranks {ranks}; choose one of {list_divisors(ranks)}"
        require(ranks % nodes == 0, uneven)


def cannot_tell_stragglers(distributed: DistributedSettings, zero: ZeroSettings, world_size: int) -> str | None:
    """Return why --log-straggler would report nothing, or None where it works."""
    if world_size == 1:
        return "there is one rank"
    others = ("expert_model_parallel_size", "islands", "num_distributed_optimizer_instances")
    sizes = {name: getattr(distributed, name) for name in (*MODEL_PARALLEL_SETTINGS, *others)}
    given = [f"{flag_of(name)} {size}" for name, size in sizes.items() if size > 1]
    given += ["--zero-stage 0"] if zero.zero_stage == 0 else []
    return f"how long ranks wait for each other is not known with {' and '.join(given)}" if given else None


def data_parallel_size(distributed: DistributedSettings, world_size: int) -> int:
    return world_size // ranks_per_model_copy(distributed)


def resolve_sizes(ranks: DistributedSettings, num_layers: int) -> DistributedSettings:
    """Translate Megatron's number of virtual stages, and expert parallelism beside ``--expert-tensor-parallel-size``.

    There EP * ETP ranks share a layer's experts. Here EP * TP ranks do, each with whole experts, so that EP is
    EP * ETP / TP, and a rank holds as many weights. Raises SettingsError.
    """
    stages, size = ranks.num_virtual_stages_per_pipeline_rank, ranks.pipeline_model_parallel_size
    if stages is not None and stages > 1:
        given = f"--num-virtual-stages-per-pipeline-rank {stages}"
        twice = f"{given} and --num-layers-per-virtual-pipeline-stage say the same; give one"
        require(ranks.num_layers_per_virtual_pipeline_stage is None, twice)
        num_layers += ranks.account_for_embedding_in_pipeline_split + ranks.account_for_loss_in_pipeline_split
        uneven = f"{given} * --pipeline-model-parallel-size {size} does not divide {num_layers} layers"
        require(num_layers % (stages * size) == 0, uneven)
        ranks = dataclasses.replace(ranks, num_layers_per_virtual_pipeline_stage=num_layers // (stages * size))
    if (expert_tp_size := ranks.expert_tensor_parallel_size) is not None:
        parts, tp_size = ranks.expert_model_parallel_size * expert_tp_size, ranks.tensor_model_parallel_size
        shared = f"--expert-model-parallel-size * --expert-tensor-parallel-size = {parts} ranks share a layer's experts"
        require(parts % tp_size == 0, f"{shared}; make this a multiple of --tensor-model-parallel-size {tp_size}")
        ranks = dataclasses.replace(ranks, expert_model_parallel_size=parts // tp_size)
    # Translated: nothing is left to say.
    return dataclasses.replace(ranks, num_virtual_stages_per_pipeline_rank=None, expert_tensor_parallel_size=None)


_UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_PIPELINE_ONLY = ("pipeline_schedule", "num_layers_per_virtual_pipeline_stage", *_UNEVEN)


def check_pipeline(settings: Settings) -> None:
    """Raise SettingsError unless layers can be split into stages as asked, and the schedule has what it needs."""
    ranks, activation, num_layers = settings.distributed, settings.activation, settings.model.num_layers or 0
    num_ranks, per_stage = ranks.pipeline_model_parallel_size, ranks.num_layers_per_virtual_pipeline_stage
    if num_ranks == 1:
        for name in _PIPELINE_ONLY:
            require(getattr(ranks, name) is None, f"{flag_of(name)} needs --pipeline-model-parallel-size above 1")
        return
    model = settings.model
    over_all = model.num_experts is not None and model.load_balancing == "all_layers_aux_loss"
    needs_all = "--moe-router-load-balancing-type all_layers_aux_loss needs all layers on one rank"
    require(not over_all, f"{needs_all}: give aux_loss, or leave --pipeline-model-parallel-size out")
    ends = [name for name in _UNEVEN if getattr(ranks, name) is not None]
    fewer = ranks.account_for_embedding_in_pipeline_split or ranks.account_for_loss_in_pipeline_split
    even = "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split divide layers evenly"
    require(not (ends and fewer), f"{even}; leave out {', '.join(map(flag_of, ends))}")
    schedule, virtual = _schedule_or_default(ranks), "--num-layers-per-virtual-pipeline-stage"
    for name in _UNEVEN:
        equal = f"{flag_of(name)} and {virtual} exclude each other: virtual stages are equal; give one"
        require(per_stage is None or getattr(ranks, name) is None, equal)
    one = f"--pipeline-schedule {schedule} has one stage on each rank; leave {virtual} out, or use interleaved"
    require(per_stage is None or schedule not in ("gpipe", "1f1b"), one)
    several = f"--pipeline-schedule {schedule} has several stages on each rank: give their layers by {virtual}"
    require(per_stage is not None or schedule not in ("interleaved", "zbv"), several)
    two = f"--pipeline-schedule zbv has two stages on each rank: {virtual} must be --num-layers / {2 * num_ranks}"
    require(schedule != "zbv" or num_layers == 2 * num_ranks * (per_stage or 0), two)
    try:
        placement = placement_of(ranks, num_layers)
    except ValueError as error:
        wrong = f"--num-layers {num_layers} cannot be split for --pipeline-model-parallel-size {num_ranks}: {error}"
        uneven = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers make stages uneven"
        raise SettingsError(f"{wrong}; choose one of {list_divisors(num_layers)}; {uneven}") from error
    smallest = min(len(layers) for layers in placement.layers)
    for name in ("recompute_num_layers", "cpu_offloading_num_layers"):
        count = getattr(activation, name) or 0
        most = f"{flag_of(name)} {count} counts layers of one stage, and the smallest stage has {smallest}"
        require(count <= smallest, f"{most}; give at most {smallest}")
    parts = f"--pipeline-schedule {schedule} splits backward passes, which --compile makes one; leave one out"
    require(not (activation.compile and schedule in SPLITS_BACKWARD), parts)
    tied = "--pipeline-schedule zbv cannot tie embeddings: use zero-bubble, or --untie-embeddings-and-output-weights"
    require(not (schedule == "zbv" and settings.model.tie_embeddings_and_output_weights), tied)


def placement_of(ranks: DistributedSettings, num_layers: int) -> Placement:
    """Place the stages that the settings ask for. Raises ValueError where layers do not divide."""
    return place_stages(
        num_layers,
        ranks.pipeline_model_parallel_size,
        ranks.num_layers_per_virtual_pipeline_stage,
        ranks.decoder_first_pipeline_num_layers,
        ranks.decoder_last_pipeline_num_layers,
        v_shaped=ranks.pipeline_schedule == "zbv",
        fewer_at_ends=(ranks.account_for_embedding_in_pipeline_split, ranks.account_for_loss_in_pipeline_split),
    )


def _schedule_or_default(ranks: DistributedSettings) -> str:
    is_virtual = ranks.num_layers_per_virtual_pipeline_stage is not None
    return ranks.pipeline_schedule or ("interleaved" if is_virtual else "1f1b")


def resolve_schedule(ranks: DistributedSettings, batches: BatchSchedule) -> DistributedSettings:
    """Fill the pipeline's schedule in. Raises ValueError if it cannot run the micro-batches that a step may have.

    By default it is 1f1b, or, where too few micro-batches never fill the pipeline, gpipe, which then does the same.
    """
    if ranks.pipeline_model_parallel_size == 1:
        return ranks
    counts, schedule = sorted(batches.micro_batch_counts()), _schedule_or_default(ranks)
    if ranks.pipeline_schedule is None and schedule == "1f1b" and counts[0] < ranks.pipeline_model_parallel_size:
        schedule = "gpipe"
    for count in counts:
        check_micro_batches(schedule, ranks.pipeline_model_parallel_size, count)
    return dataclasses.replace(ranks, pipeline_schedule=schedule)


def check_tensor_parallel(settings: Settings) -> None:
    """Raise SettingsError unless heads, MLP and, with sequence parallelism, the sequence can be split evenly."""
    distributed, model, seq_length = settings.distributed, settings.model, settings.training.seq_length or 0
    size, compiles = distributed.tensor_model_parallel_size, settings.activation.compile
    require(size == 1 or not compiles, f"--compile does not support --tensor-model-parallel-size {size}: leave one out")
    split = {flag_of(name): getattr(model, name) for name in ("num_attention_heads", "num_query_groups")}
    split["--ffn-hidden-size"] = model.ffn_hidden_size
    if model.num_experts is not None and model.shared_expert_size is not None:
        split["--moe-shared-expert-intermediate-size"] = model.shared_expert_size
    if distributed.sequence_parallel:
        shared = " / --context-parallel-size" if distributed.context_parallel_size > 1 else ""
        split[f"--seq-length{shared} (split by --sequence-parallel)"] = seq_length // distributed.context_parallel_size
    numbers = {what: number or 0 for what, number in split.items()}
    uneven = [f"{what} {number}" for what, number in numbers.items() if number % size]
    sizes = list_divisors(math.gcd(*numbers.values()))
    require(not uneven, f"--tensor-model-parallel-size {size} does not divide {', '.join(uneven)}; choose from {sizes}")


def check_expert_parallel(settings: Settings, fsdp_size: int) -> None:
    """Raise SettingsError unless experts can be divided among ranks; ``fsdp_size`` ranks shard a model."""
    distributed, experts, flag = settings.distributed, settings.model.num_experts, "--expert-model-parallel-size"
    size, tp_size = distributed.expert_model_parallel_size, distributed.tensor_model_parallel_size
    given, bits = f"{flag} {size}", distributed.moe_token_bits
    require(bits is None or size > 1, f"--moe-token-bits {bits} needs an {flag} above 1")
    require(bits in (None, 4, 6, 8), f"--moe-token-bits must be one of (4, 6, 8), got {bits}")
    if size > 1:
        require_divides(flag, size, fsdp_size, "rank(s) that have different samples or parts of them")
        replicas = distributed.num_distributed_optimizer_instances
        in_replica = f"{fsdp_size // replicas} rank(s) of each of --num-distributed-optimizer-instances {replicas}"
        require(fsdp_size // replicas % size == 0, f"{given} does not divide {in_replica} (HSDP); change one")
        compiles = settings.activation.compile
        require(not compiles, f"--compile does not see tokens sent to experts: leave it or {given} out")
        per_node = settings.zeropp.stated_ranks_per_node or 1
        lies_evenly = per_node == 1 or per_node % size == 0 or size % per_node == 0
        require(lies_evenly, f"{given} and nodes of {per_node} ranks: one must be a multiple of the other")
    if experts is not None:
        parts, per_layer = size * tp_size, settings.model.moe_experts_per_layer
        uneven = [number for number in map(int, per_layer.split(",") if per_layer else [experts]) if number % parts]
        experts = next(iter(uneven), experts)
        divided = f"{given} * --tensor-model-parallel-size {tp_size} = {parts} rank(s)"
        choose = f"choose sizes whose product is one of {list_divisors(experts)}"
        require(not uneven, f"--num-experts {experts} cannot be divided evenly among {divided}; {choose}")


def check_vocabulary(distributed: DistributedSettings, padded_size: int, multiple: int) -> None:
    """Raise SettingsError unless the vocabulary, padded to ``multiple``, can be sharded over the tensor-parallel ranks.

    The padding does not depend on their number, as Megatron's does: checkpoints load under any.
    """
    size = distributed.tensor_model_parallel_size
    uneven = f"--tensor-model-parallel-size {size} does not divide the vocabulary of {padded_size}"
    multiple = math.lcm(multiple, size)
    choose = f"give --make-vocab-size-divisible-by {multiple}, or a size that is one of {list_divisors(padded_size)}"
    require(padded_size % size == 0, f"{uneven}; {choose}")
