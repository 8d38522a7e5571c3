"""Plans for ``parallelize_module``: how tensor parallelism shards each module of a model.

A plan names modules by their paths, ``*`` for every layer. ``megatron_zpp.parallel.tensor`` applies it.
"""

import re
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.parallel.tensor import Replicated, ShardedRows

Plan = dict[str, ParallelStyle]


def decoder_plan(config: DecoderConfig, sequence_parallel: bool) -> Plan:
    """Shard a ``Decoder``: attention by heads, MLPs by channels, the vocabulary by rows, and what is around experts."""
    # How the tensor-parallel ranks hold activations [B, S, H] between linear layers.
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()  # the output is a DTensor
    # The residual stream, to which these norms add, is no DTensor.
    local_norm = (SequenceParallel if sequence_parallel else Replicated)(use_local_output=True)
    plan: Plan = {
        "word_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.self_attention.linear_proj": RowwiseParallel(output_layouts=between),
        "final_norm": norm,
    }
    if not config.no_pre_norms:
        plan |= {"layers.*.input_norm": norm, "layers.*.pre_mlp_norm": norm}
    if config.post_self_attn_layernorm:
        plan["layers.*.post_attention_norm"] = local_norm
    if config.post_mlp_layernorm:
        plan["layers.*.post_mlp_norm"] = local_norm
    attention = _latent_attention_plan if config.multi_latent_attention else _self_attention_plan
    plan |= {f"layers.*.self_attention.{name}": style for name, style in attention(config, between).items()}
    if config.position_embedding_type == "learned_absolute":
        plan["position_embeddings"] = Replicated(between, use_local_output=True)
    for layer in range(config.num_layers):
        mlp = f"layers.{layer}.mlp"
        if layer not in config.layers_with_experts:
            plan |= _mlp_plan(mlp, config, between)
            continue
        # All ranks have all tokens of a layer with experts, so that routes agree. What experts did stays as it is.
        layouts: dict[str, Any] = dict(input_layouts=between, desired_input_layouts=Replicate(), use_local_input=True)
        layouts |= dict(output_layouts=(Replicate(), None), desired_output_layouts=(between, None))
        plan[mlp] = PrepareModuleInputOutput(**layouts)
        plan[f"{mlp}.router"] = Replicated(use_local_output=True)
        assert config.moe is not None
        if config.moe.residual:
            plan[f"{mlp}.coefficient"] = Replicated(use_local_output=True)
        if config.moe.shared_expert_size is not None:
            plan |= _mlp_plan(f"{mlp}.shared_expert", config, Replicate())
        if config.moe.shared_expert_gate:
            plan[f"{mlp}.shared_gate"] = Replicated(use_local_output=True)
    if not config.tie_embeddings:
        plan["output_layer"] = ShardedRows()
    return plan


def _self_attention_plan(config: DecoderConfig, between: Placement) -> Plan:
    plan: Plan = {"linear_qkv": ColwiseParallel(input_layouts=between)}
    if config.qk_layernorm and config.qk_layernorm_whole:
        # [B, S, heads * head_dim]: every rank norms all heads, and keeps its own.
        plan |= {name: Replicated(Shard(2), True, Shard(2)) for name in ("q_layernorm", "k_layernorm")}
    elif config.qk_layernorm:
        # Each rank norms its own heads [B, S, heads, head_dim] with the same weight.
        per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"q_layernorm": per_head, "k_layernorm": per_head}
    if config.has_sinks:
        plan["sinks"] = ShardedRows()
    return plan


def _latent_attention_plan(config: DecoderConfig, between: Placement) -> Plan:
    """Shard what makes heads out of latent vectors. Those are of few channels; every rank gets them whole."""
    down = ColwiseParallel(input_layouts=between, output_layouts=Replicate(), use_local_output=False)
    plan: Plan = {"linear_kv_down_proj": down, "linear_kv_up_proj": ColwiseParallel()}
    if config.q_lora_rank is None:
        plan["linear_q_proj"] = ColwiseParallel(input_layouts=between)
    else:
        plan |= {"linear_q_down_proj": down, "linear_q_up_proj": ColwiseParallel()}
    if config.qk_layernorm:
        plan |= {name: Replicated() for name in ("kv_layernorm", "q_layernorm")[: 1 + (config.q_lora_rank is not None)]}
    return plan


def _mlp_plan(mlp: str, config: DecoderConfig, between: Placement) -> Plan:
    """Shard an MLP by its channels. ``between``: how the ranks hold what goes in and comes out."""
    plan: Plan = {f"{mlp}.linear_fc2": RowwiseParallel(output_layouts=between)}
    if config.activation.is_gated:
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
