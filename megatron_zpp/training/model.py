"""From settings to a model: whole on the meta device, and the part of it that a rank trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.gpt import GPT, GPTConfig
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.llama import Llama, LlamaConfig
from megatron_zpp.parallel.context import apply_context_parallel
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD, Pipeline
from megatron_zpp.parallel.sharding import shard_model
from megatron_zpp.parallel.stages import join_stages, keep_stage
from megatron_zpp.parallel.tensor import apply_tensor_parallelism
from megatron_zpp.settings.groups import ModelSettings, PrecisionSettings, Settings
from megatron_zpp.zeropp import ZeroPP, ZeroPPInterface, apply_zeropp, emulate_zeropp
from megatron_zpp.zeropp.topology import gather_node_names


def build_model(architecture: str, settings: ModelSettings, vocab_size: int) -> GPT | Llama:
    """The model without storage, its vocabulary padded: call ``to_empty`` and ``init_weights`` on it."""
    assert settings.num_layers and settings.hidden_size and settings.num_attention_heads  # by parse_settings
    assert settings.attention_dropout is not None and settings.hidden_dropout is not None
    shape = dict(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        vocab_size=padded_vocab_size(vocab_size, settings.make_vocab_size_divisible_by),
        ffn_hidden_size=settings.ffn_hidden_size,
        kv_channels=settings.kv_channels,
        norm_epsilon=settings.norm_epsilon,
        attention_dropout=settings.attention_dropout,
        hidden_dropout=settings.hidden_dropout,
        init_method_std=settings.init_method_std,
        tie_embeddings=settings.tie_embeddings_and_output_weights,
    )
    with torch.device("meta"):
        if architecture == "gpt":
            assert settings.max_position_embeddings
            return GPT(
                GPTConfig(
                    **shape,  # type: ignore[arg-type]
                    max_position_embeddings=settings.max_position_embeddings,
                )
            )
        return Llama(
            LlamaConfig(
                **shape,  # type: ignore[arg-type]
                num_query_groups=settings.num_query_groups,
                rotary_base=settings.rotary_base,
                rope_scaling_factor=settings.rope_scaling_factor if settings.use_rope_scaling else None,
            )
        )


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """``vocab_size`` up to the next multiple: even sizes are faster."""
    return -(-vocab_size // multiple) * multiple


def mixed_precision(precision: PrecisionSettings) -> MixedPrecisionPolicy:
    """Megatron's precision flags as FSDP2's policy. Master parameters and the optimizer stay in fp32."""
    if not (precision.bf16 or precision.fp16):
        return MixedPrecisionPolicy()
    compute = torch.bfloat16 if precision.bf16 else torch.float16
    if precision.grad_reduce_in_bf16:
        reduce = torch.bfloat16
    elif precision.bf16 or precision.accumulate_allreduce_grads_in_fp32:
        reduce = torch.float32
    else:
        reduce = compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def build_model_on_ranks(
    settings: Settings, vocab_size: int, device: torch.device, mesh: Mesh
) -> tuple[GPT | Llama, Pipeline | None, ZeroPPInterface | None]:
    """The model, sharded before it has storage, so that it never exists whole on one rank; whole if it emulates."""
    zero, ranks, precision = settings.zero, settings.distributed, mixed_precision(settings.precision)
    _check_nodes_alike(settings, mesh)
    build = partial(_build_whole, settings, vocab_size, mesh)
    pipeline: Pipeline | None = None
    zeropp: ZeroPPInterface | None = None
    if mesh.pp_size > 1:
        model, pipeline, zeropp = _build_stages(settings, build, device, mesh)
    else:
        model = build()
        _prepare_model(model, settings)
        if ranks.emulate_ranks is None:
            shard_model(model, mesh, zero.zero_stage, precision)
            if zero.zero_stage > 0:
                zeropp = apply_zeropp(model, settings.zeropp, tensor_parallel=mesh.tensor_parallel_group())
        model.to_empty(device=device)
    with progress("initializing weights"):
        init_weights(model, settings.training.seed)
    if ranks.emulate_ranks is not None:
        zeropp = emulate_zeropp(
            model,
            settings.zeropp,
            ranks.emulate_nodes,
            ranks.emulate_ranks // ranks.emulate_nodes,
            units=list(model.layers),
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            zero_stage=zero.zero_stage,
        )
    if zeropp is not None:
        zeropp.monitor_errors(zero.zero_monitor_interval)
    return model, pipeline, zeropp


def _check_nodes_alike(settings: Settings, mesh: Mesh) -> None:
    """Refuse data-parallel groups that are split over nodes in different ways, each of which would be fine alone."""
    config = settings.zeropp
    if mesh.pp_size * mesh.tp_size == 1 or config.ranks_per_node is not None or config.hpz_partition_size > 1:
        return
    names = gather_node_names(mesh.fsdp.get_group())
    mine = [names.count(name) for name in dict.fromkeys(names)]  # ranks on each node
    of_all: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    with errors_on_all_ranks():
        others = next((ranks for ranks in of_all if ranks != of_all[0]), None)
        if others is not None:
            raise ValueError(
                f"some data-parallel groups have {of_all[0]} ranks on their nodes, others {others}: choose "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size so that all are alike, or give "
                "--zero-ranks-per-node"
            )


def _build_whole(settings: Settings, vocab_size: int, mesh: Mesh) -> GPT | Llama:
    """The whole model on the meta device, as the context- and tensor-parallel ranks have it."""
    model = build_model(settings.architecture, settings.model, vocab_size)
    if mesh.cp_size > 1:
        apply_context_parallel(model, mesh.grid["cp"])
    if mesh.tp_size > 1:
        apply_tensor_parallelism(model, mesh, settings.distributed.sequence_parallel)
    return model


def _prepare_model(model: GPT | Llama, settings: Settings) -> None:
    """What is done to a model, or to one stage of it, before it is sharded."""
    activation = settings.activation
    if activation.recompute_granularity is not None:
        apply_activation_checkpointing(
            model, activation.recompute_granularity, activation.recompute_method, activation.recompute_num_layers
        )
    if activation.compile:
        for block in model.layers:
            block.forward = torch.compile(block.forward)


def _build_stages(
    settings: Settings, build: Callable[[], GPT | Llama], device: torch.device, mesh: Mesh
) -> tuple[GPT | Llama, Pipeline, ZeroPP]:
    """This rank's stages, cut out of the model that ``build`` makes: as one model, and as a pipeline."""
    training, model, precision = settings.training, build(), mixed_precision(settings.precision)
    config = model.config
    schedule = settings.distributed.pipeline_schedule
    assert training.micro_batch_size and training.seq_length and schedule
    # Where FSDP2's hooks cannot follow the backward pass, a step gathers parameters once and reduces gradients once.
    zero_stage = 1 if schedule in SPLITS_BACKWARD else settings.zero.zero_stage
    placement = placement_of(settings.distributed, config.num_layers)
    stages = {number: build() for number in placement.stages_of(mesh.pp_rank)}
    for number, stage in stages.items():
        keep_stage(stage, placement, number)
        _prepare_model(stage, settings)
        shard_model(stage, mesh, zero_stage, precision)
    units = nn.ModuleDict({f"stage{number}": stage for number, stage in stages.items()})
    zeropp = apply_zeropp(units, settings.zeropp, mesh.grid["pp"].get_group(), mesh.tensor_parallel_group())
    for stage in stages.values():
        stage.to_empty(device=device)
    length = training.seq_length // mesh.cp_size
    tokens = torch.empty((training.micro_batch_size, length), dtype=torch.int64, device="meta")
    length //= mesh.tp_size if settings.distributed.sequence_parallel else 1
    hidden = torch.empty(
        (training.micro_batch_size, length, config.hidden_size),
        dtype=precision.param_dtype or torch.float32,
        device="meta",
        requires_grad=True,
    )
    pipeline = Pipeline(
        stages, placement, mesh, schedule, tokens, hidden, zero_stage, zeropp, tied_embeddings=config.tie_embeddings
    )
    return join_stages(model, stages), pipeline, zeropp
