"""Plans for ``parallelize_module``: how tensor parallelism shards each module of a model.

A plan names modules by their paths, ``*`` for every layer. ``megatron_zpp.parallel.tensor`` applies it.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.parallel.experts import GatherTokens
from megatron_zpp.parallel.tensor import Replicated, ShardedRows

Plan = dict[str, ParallelStyle]


def decoder_plan(config: DecoderConfig, sequence_parallel: bool) -> Plan:
    """Shard ``models.decoder.Decoder``: attention by heads, MLPs by channels, the vocabulary by rows.

    Experts are divided by ``parallel.experts``; the plan covers what is around them.
    """
    # How the tensor-parallel ranks hold activations [B, S, H] between linear layers.
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()  # the output is a DTensor
    plan: Plan = {
        "word_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.input_norm": norm,
        "layers.*.self_attention.linear_qkv": ColwiseParallel(input_layouts=between),
        "layers.*.self_attention.linear_proj": RowwiseParallel(output_layouts=between),
        "layers.*.pre_mlp_norm": norm,
        "final_norm": norm,
    }
    if config.position_embedding_type == "learned_absolute":
        plan["position_embeddings"] = Replicated(between, use_local_output=True)
    if config.qk_layernorm:
        # Each rank norms its own heads [B, S, heads, head_dim] with the same weight.
        per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"layers.*.self_attention.q_layernorm": per_head, "layers.*.self_attention.k_layernorm": per_head}
    for layer in range(config.num_layers):
        mlp = f"layers.{layer}.mlp"
        if layer not in config.layers_with_experts:
            plan |= _mlp_plan(mlp, config.swiglu, between)
            continue
        plan |= {mlp: GatherTokens(between), f"{mlp}.router": Replicated(use_local_output=True)}
        assert config.moe is not None
        if config.moe.residual:
            plan[f"{mlp}.coefficient"] = Replicated(use_local_output=True)
        if config.moe.shared_expert_size is not None:
            plan |= _mlp_plan(f"{mlp}.shared_expert", config.swiglu, Replicate())
    if not config.tie_embeddings:
        plan["output_layer"] = ShardedRows()
    return plan


def _mlp_plan(mlp: str, swiglu: bool, between: Placement) -> Plan:
    """Shard an MLP by its channels. ``between``: how the ranks hold what goes in and comes out."""
    plan: Plan = {f"{mlp}.linear_fc2": RowwiseParallel(output_layouts=between)}
    if swiglu:
        # Gathered once for both linear layers.
        plan[mlp] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {f"{mlp}.linear_fc1_gate": ColwiseParallel(), f"{mlp}.linear_fc1_up": ColwiseParallel()}
    else:
        plan[f"{mlp}.linear_fc1"] = ColwiseParallel(input_layouts=between)
    return plan


def split_dimensions(model: nn.Module, plan: Plan) -> dict[nn.Parameter, int]:
    """Return the dimension along which tensor-parallel ranks divide each parameter that they do not hold whole."""
    found: dict[nn.Parameter, int] = {}
    for name, module in model.named_modules():
        style = plan.get(name) or plan.get(re.sub(r"^layers\.\d+", "layers.*", name))
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(style, ColwiseParallel | ShardedRows):
                found[parameter] = 0
            elif isinstance(style, RowwiseParallel) and key == "weight":
                found[parameter] = 0 if isinstance(module, nn.Embedding) else 1
    return found
