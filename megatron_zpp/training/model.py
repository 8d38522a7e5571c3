"""From settings to a model: whole on the meta device, and the part of it that a rank trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.families import Architecture
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import state_numel
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.experts import apply_expert_parallelism
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD, Pipeline, sharding_stage
from megatron_zpp.parallel.sharding import mixed_precision, offloading, shard_model
from megatron_zpp.parallel.stages import join_stages, keep_stage
from megatron_zpp.parallel.tensor import apply_tensor_parallelism
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp import Traffic, ZeroPP, ZeroPPInterface, apply_zeropp, emulate_zeropp
from megatron_zpp.zeropp.fsdp.topology import gather_node_names, gather_objects
from megatron_zpp.zeropp.own_rank import local_part


def build_model_on_ranks(
    architecture: Architecture,
    settings: ResolvedSettings,
    vocab_size: int,
    device: torch.device,
    mesh: Mesh,
    token_traffic: Traffic,
    emulated_island: int = 0,
) -> tuple[Transformer, Pipeline | None, ZeroPPInterface | None]:
    """The model, sharded before it has storage, so that it never exists whole on one rank; whole if it emulates.

    token_traffic: counts the bytes of tokens that are sent to experts. emulated_island: whose model, if it emulates.
    """
    zero, ranks, precision = settings.zero, settings.distributed, mixed_precision(settings.precision)
    _check_nodes_alike(settings, mesh)
    _check_replicas_on_nodes(settings, mesh)
    build = partial(_build_whole, architecture, settings, vocab_size, mesh, token_traffic)
    offload, storage = offloading(zero, device)
    pipeline: Pipeline | None = None
    zeropp: ZeroPPInterface | None = None
    if mesh.pp_size > 1:
        model, pipeline, zeropp = _build_stages(architecture, settings, build, device, mesh)
    else:
        model = build()
        _prepare_model(model, settings)
        if ranks.emulate_ranks is None:
            shard_model(model, mesh, zero.zero_stage, precision, offload)
            if zero.zero_stage > 0:
                zeropp = apply_zeropp(model, settings.zeropp, tensor_parallel=mesh.tensor_parallel_group())
        _check_memory(model, settings, storage)
        model.to_empty(device=storage)
    with progress("initializing weights"):
        init_weights(model, settings.training.seed, architecture.initial_std)
    if ranks.emulate_ranks is not None:
        zeropp = emulate_zeropp(
            model,
            settings.zeropp,
            ranks.emulate_nodes // mesh.emulated_islands,
            ranks.emulate_ranks // ranks.emulate_nodes,
            units=[*model.layers, *model.end_units()],
            gathered_once=model.end_units(),
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            zero_stage=zero.zero_stage,
            first_rank=emulated_island * mesh.fsdp_size,
        )
    if zeropp is not None:
        zeropp.monitor_errors(zero.zeropp_monitor_interval)
    return model, pipeline, zeropp


def _check_nodes_alike(settings: ResolvedSettings, mesh: Mesh) -> None:
    """Refuse data-parallel groups that are split over nodes in different ways, each of which would be fine alone."""
    config = settings.zeropp
    if mesh.pp_size * mesh.tp_size == 1 or config.stated_ranks_per_node is not None:
        return
    names = gather_node_names(mesh.fsdp.get_group())
    mine = [names.count(name) for name in dict.fromkeys(names)]  # ranks on each node
    of_all = gather_objects(mine)
    with errors_on_all_ranks():
        others = next((ranks for ranks in of_all if ranks != of_all[0]), None)
        if others is not None:
            raise ValueError(
                f"some data-parallel groups have {of_all[0]} ranks on their nodes, others {others}: choose "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size so that all are alike, or give "
                "--zeropp-ranks-per-node"
            )


def _check_replicas_on_nodes(settings: ResolvedSettings, mesh: Mesh) -> None:
    """Refuse nodes that cut HSDP's replicas unevenly; where flags say what a node is, ``parse_settings`` has."""
    replicas = settings.distributed.num_distributed_optimizer_instances
    if replicas == 1 or settings.zeropp.ranks_per_node is not None:
        return
    names = gather_node_names(mesh.fsdp.get_group())
    with errors_on_all_ranks():
        check_replicas_on_nodes(replicas, len(names), names.count(names[0]))


def _check_memory(model: nn.Module, settings: ResolvedSettings, device: torch.device) -> None:
    """Refuse a model that no rank could train, while it is on the meta device: what is kept in fp32 must fit alone.

    Activations, gathered parameters and what else is on the machine come on top, so not all that passes fits.
    """
    copies = 1 if settings.training.skip_train else 2
    needed = 4 * copies * sum(local_part(parameter).numel() for parameter in model.parameters())
    if not settings.training.skip_train:
        needed += 4 * state_numel(model.named_parameters(), settings.optimizer)
    if device.type == "cuda":
        memory, ranks, where = torch.cuda.mem_get_info(device)[1], 1, "its GPU"
    else:
        memory, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: they share it
    with errors_on_all_ranks():
        if needed * ranks > memory:
            raise ValueError(
                f"the model needs about {needed / 1e9:,.1f} GB for parameters, gradients and optimizer on each rank, "
                f"{where} has {memory / 1e9:,.1f} GB for {ranks} rank(s): make the model smaller, or start on more "
                "machines"
            )


def _build_whole(
    architecture: Architecture, settings: ResolvedSettings, vocab_size: int, mesh: Mesh, token_traffic: Traffic
) -> Transformer:
    """The whole model on the meta device, as the context-, tensor- and expert-parallel ranks have it."""
    model = architecture.build_model(settings.model, vocab_size)
    if mesh.cp_size > 1:
        assert architecture.apply_context_parallel is not None  # by parse_settings
        architecture.apply_context_parallel(model, mesh.cp)
    if mesh.tp_size > 1:
        assert architecture.tensor_parallel_plan is not None
        sequence_parallel = settings.distributed.sequence_parallel
        plan = architecture.tensor_parallel_plan(model.config, sequence_parallel)
        apply_tensor_parallelism(model, mesh, plan, sequence_parallel)
    if settings.model.num_experts is not None and mesh.tp_size * mesh.ep_size > 1:
        token_bits = settings.distributed.moe_token_bits
        apply_expert_parallelism(model, mesh, settings.zeropp.stated_ranks_per_node, token_bits, token_traffic)
    return model


def _prepare_model(model: Transformer, settings: ResolvedSettings) -> None:
    """What is done to a model, or to one stage of it, before it is sharded."""
    activation = settings.activation
    if activation.recompute_granularity is not None:
        apply_activation_checkpointing(
            model,
            activation.recompute_granularity,
            activation.recompute_method,
            activation.recompute_num_layers,
            splits_backward=settings.distributed.pipeline_schedule in SPLITS_BACKWARD,
        )
    if activation.compile:
        for block in model.layers:
            block.forward = torch.compile(block.forward)


def _build_stages(
    architecture: Architecture,
    settings: ResolvedSettings,
    build: Callable[[], Transformer],
    device: torch.device,
    mesh: Mesh,
) -> tuple[Transformer, Pipeline, ZeroPP]:
    """This rank's stages, split off the model that ``build`` makes: as one model, and as a pipeline."""
    training, model, precision = settings.training, build(), mixed_precision(settings.precision)
    offload, storage = offloading(settings.zero, device)
    config = model.config
    assert architecture.stages is not None  # by parse_settings
    modules = architecture.stages(config)
    schedule = settings.distributed.pipeline_schedule
    assert training.micro_batch_size and training.seq_length and schedule
    zero_stage = sharding_stage(settings.zero.zero_stage, schedule)
    placement = placement_of(settings.distributed, config.num_layers)
    stages = {number: build() for number in placement.stages_of(mesh.pp_rank)}
    for number, stage in stages.items():
        keep_stage(stage, modules, placement, number)
        _prepare_model(stage, settings)
        shard_model(stage, mesh, zero_stage, precision, offload)
    units = nn.ModuleDict({f"stage{number}": stage for number, stage in stages.items()})
    zeropp = apply_zeropp(units, settings.zeropp, mesh.pp.get_group(), mesh.tensor_parallel_group())
    _check_memory(units, settings, storage)
    for stage in stages.values():
        stage.to_empty(device=storage)
    length = training.seq_length // mesh.cp_size
    tokens = torch.empty((training.micro_batch_size, length), dtype=torch.int64, device="meta")
    length //= mesh.tp_size if settings.distributed.sequence_parallel else 1
    hidden = torch.empty(
        (training.micro_batch_size, length, config.hidden_size),
        dtype=precision.param_dtype or torch.float32,
        device="meta",
        requires_grad=True,
    )
    pipeline = Pipeline(stages, placement, mesh, schedule, tokens, hidden, zero_stage, zeropp, tied=modules.tied)
    return join_stages(model, stages), pipeline, zeropp
