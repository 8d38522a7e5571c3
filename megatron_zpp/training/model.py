"""Build a model from its settings: whole on the meta device, then the part of it that a rank trains."""

import os
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_compute import layers_in_bf16
from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.families import Architecture
from megatron_zpp.integrations.float8 import convert_to_float8
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing, check_recomputed_modules
from megatron_zpp.models.activation_offload import ActivationOffload
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.lora import add_adapters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import state_numel
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.experts import apply_expert_parallelism
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD, Pipeline, sharding_stage
from megatron_zpp.parallel.sharding import mixed_precision, offloading, shard_model
from megatron_zpp.parallel.stages import Placement, StageModules, join_stages, keep_stage
from megatron_zpp.parallel.tensor import apply_tensor_parallelism
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.zeropp import Traffic, ZeroPP, apply_zeropp
from megatron_zpp.zeropp.api import local_part
from megatron_zpp.zeropp.fsdp.topology import gather_node_names, gather_objects


@dataclass
class ModelBuilder:
    """Builds models on this rank. ``zeropp`` and ``pipeline`` are of the model that was built last."""

    architecture: Architecture
    settings: ResolvedSettings
    vocab_size: int
    device: torch.device
    mesh: Mesh
    token_traffic: Traffic  # counts the bytes of tokens that are sent to experts
    loss_class: type[LanguageModelLoss] = LanguageModelLoss
    pipeline: Pipeline | None = None  # None with one stage
    zeropp: ZeroPP | None = None  # None at ZeRO stage 0
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)  # shared by all stages

    def __post_init__(self) -> None:
        self.loss = self.loss_class(self.mesh, self.device, compiled=self.settings.activation.compile)

    def build(self) -> Transformer:
        """Build the model, sharded before it has storage, so that no rank ever holds it whole."""
        settings, mesh, zero = self.settings, self.mesh, self.settings.zero
        self._check_nodes()
        parts = self.build_parts()
        with errors_on_all_ranks():
            self.check_memory(*parts.values())
        if mesh.pp_size > 1:
            model = self._build_pipeline(parts)
        else:
            (model,) = parts.values()
            if zero.zero_stage > 0:
                group = mesh.tensor_parallel_group()
                self.zeropp = apply_zeropp(model, settings.zeropp, tensor_parallel=group)
            self._allocate(model)
        with progress("initializing weights"):
            init_weights(model, settings.training.seed, self.architecture.initial_std)
        if self.zeropp is not None:
            self.zeropp.monitor_errors(zero.zeropp_monitor_interval)
        return model

    def build_parts(self) -> dict[int, Transformer]:
        """Build this rank's stages on the meta device, by number, prepared and sharded; without a pipeline, {0: all}.

        Refuses, on all ranks, what no rank could train: a dry run ends here.
        """
        if self.mesh.pp_size == 1:
            parts = {0: self._build_whole()}
        else:
            modules, placement = self._division()
            parts = {number: self._build_whole() for number in placement.stages_of(self.mesh.pp_rank)}
            for number, stage in parts.items():
                keep_stage(stage, modules, placement, number)
        offload, _ = offloading(self.settings.zero, self.device)
        zero_stage = sharding_stage(self.settings.zero.zero_stage, self.settings.distributed.pipeline_schedule)
        for part in parts.values():
            self._prepare(part)
            shard_model(part, self.mesh, zero_stage, mixed_precision(self.settings.precision), offload)
        return parts

    def _check_nodes(self) -> None:
        """Refuse data-parallel groups that nodes divide differently, and HSDP replicas that nodes divide unevenly."""
        mesh, config = self.mesh, self.settings.zeropp
        replicas = self.settings.distributed.num_distributed_optimizer_instances
        must_agree = mesh.pp_size * mesh.tp_size > 1 and config.stated_ranks_per_node is None
        has_replicas = replicas > 1 and config.ranks_per_node is None  # else ``parse_settings`` has checked them
        if not (must_agree or has_replicas):
            return
        names = gather_node_names(mesh.fsdp.get_group())
        if must_agree:
            per_rank = gather_objects([names.count(name) for name in dict.fromkeys(names)])  # ranks on each node
            with errors_on_all_ranks():
                others = next((ranks for ranks in per_rank if ranks != per_rank[0]), None)
                if others is not None:
                    unlike = f"some data-parallel groups have {per_rank[0]} ranks on their nodes, others {others}"
                    raise ValueError(f"{unlike}: choose other parallel sizes, or give --zeropp-ranks-per-node")
        if has_replicas:
            with errors_on_all_ranks():
                check_replicas_on_nodes(replicas, len(names), names.count(names[0]))

    def _build_whole(self) -> Transformer:
        """Build the whole model on the meta device, as the context-, tensor- and expert-parallel ranks have it."""
        architecture, settings, mesh = self.architecture, self.settings, self.mesh
        model = architecture.build_model(settings.model, self.vocab_size)
        if (lora := settings.lora).lora_rank is not None:
            with errors_on_all_ranks():
                add_adapters(model, lora.lora_rank, lora.lora_alpha)
        with errors_on_all_ranks():
            check_recomputed_modules(model, settings.activation.recompute_modules or ())
        if (precision := settings.precision).fp8_format is not None:
            assert precision.fp8_recipe is not None  # by parse_settings
            start, end = layers_in_bf16(precision)
            with errors_on_all_ranks():
                blocks = model.layers[start : len(model.layers) - end]
                convert_to_float8(blocks, precision.fp8_recipe, self.device.type == "cpu", mesh.tp_size)
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
            ranks_per_node = settings.zeropp.stated_ranks_per_node
            apply_expert_parallelism(model, mesh, ranks_per_node, token_bits, self.token_traffic)
        return model

    def _prepare(self, model: Transformer) -> None:
        """Set up loss, recomputation, compilation and offloading of a model, or of one stage, before it is sharded."""
        model.loss, activation = self.loss, self.settings.activation
        if activation.recompute_granularity is not None:
            apply_activation_checkpointing(
                model,
                activation.recompute_granularity,
                activation.recompute_method,
                activation.recompute_num_layers,
                modules=activation.recompute_modules or (),
                splits_backward=self.settings.distributed.pipeline_schedule in SPLITS_BACKWARD,
            )
        if activation.compile:
            for block in model.layers:
                block.forward = torch.compile(block.forward)
        if activation.cpu_offloading_num_layers > 0:
            self.activation_offload.apply(list(model.layers), activation.cpu_offloading_num_layers)

    def _division(self) -> tuple[StageModules, Placement]:
        """Return which modules the first and last stages have, and which rank has which layers."""
        config = self.architecture.build_config(self.settings.model, self.vocab_size)
        assert self.architecture.stages is not None  # by parse_settings
        return self.architecture.stages(config), placement_of(self.settings.distributed, config.num_layers)

    def kept_bytes(self, *models: nn.Module) -> int:
        """Count the bytes of parameters, gradients and optimizer in fp32 that this rank keeps of these models."""
        is_trained = not self.settings.training.skip_train
        parameters = [named for model in models for named in model.named_parameters()]
        state = state_numel(parameters, self.settings.optimizer) if is_trained else 0
        return 4 * ((1 + is_trained) * sum(local_part(parameter).numel() for _, parameter in parameters) + state)

    def check_memory(self, *models: nn.Module) -> None:
        """Raise ValueError if no rank could train these models: what is kept in fp32 must fit alone.

        Activations, gathered parameters and what else is on the machine come on top, so not all that passes fits.
        """
        _, device = offloading(self.settings.zero, self.device)
        needed = self.kept_bytes(*models)
        if device.type == "cuda":
            memory, ranks, where = torch.cuda.mem_get_info(device)[1], 1, "its GPU"
        else:
            memory, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
            ranks = self.settings.distributed.local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # share it
        if needed * ranks > memory:
            needs = f"the model needs about {needed / 1e9:,.1f} GB of parameters, gradients and optimizer a rank"
            has = f"{where} has {memory / 1e9:,.1f} GB for {ranks} rank(s)"
            raise ValueError(f"{needs}, {has}: make the model smaller, or start on more machines")

    def _allocate(self, *models: nn.Module) -> None:
        """Give models on the meta device storage."""
        _, device = offloading(self.settings.zero, self.device)
        for model in models:
            model.to_empty(device=device)
            for module in model.modules():  # offloaded or not, modules compute with buffers where they compute
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(self.device)

    def _build_pipeline(self, stages: dict[int, Transformer]) -> Transformer:
        """Build of this rank's stages one model, which is returned, and a pipeline."""
        settings, mesh, training, model = self.settings, self.mesh, self.settings.training, self._build_whole()
        (modules, placement), schedule = self._division(), settings.distributed.pipeline_schedule
        assert schedule is not None  # by parse_settings
        units = nn.ModuleDict({f"stage{number}": stage for number, stage in stages.items()})
        zeropp = apply_zeropp(units, settings.zeropp, mesh.pp.get_group(), mesh.tensor_parallel_group())
        self._allocate(*stages.values())
        length = training.seq_length // mesh.cp_size
        tokens = torch.empty((training.micro_batch_size, length), dtype=torch.int64, device="meta")
        length //= mesh.tp_size if settings.distributed.sequence_parallel else 1
        hidden = torch.empty(
            (training.micro_batch_size, length, model.config.hidden_size),
            dtype=mixed_precision(settings.precision).param_dtype or torch.float32,
            device="meta",
            requires_grad=True,
        )
        zero_stage = sharding_stage(settings.zero.zero_stage, schedule)
        pipeline = Pipeline(stages, placement, mesh, schedule, tokens, hidden, zero_stage, zeropp, tied=modules.tied)
        self.pipeline, self.zeropp = pipeline, zeropp
        return join_stages(model, stages)
