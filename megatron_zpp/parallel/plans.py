"""How tensor parallelism shards each module of a model: plans for ``parallelize_module``.

A plan names modules by their paths, ``*`` for every layer. ``megatron_zpp.parallel.tensor`` applies it.
"""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from megatron_zpp.models.transformer import DecoderConfig
from megatron_zpp.parallel.tensor import Replicated, ShardedRows, norm_style

Plan = dict[str, ParallelStyle]


def gpt_plan(config: DecoderConfig, sequence_parallel: bool) -> Plan:
    """Of ``models.gpt.GPT``."""
    between = _between_linear_layers(sequence_parallel)
    return _decoder_plan(config.tie_embeddings, sequence_parallel) | {
        "position_embeddings": Replicated(between, use_local_output=True),
        "layers.*.mlp.linear_fc1": ColwiseParallel(input_layouts=between),
    }


def llama_plan(config: DecoderConfig, sequence_parallel: bool) -> Plan:
    """Of ``models.llama.Llama``."""
    between = _between_linear_layers(sequence_parallel)
    return _decoder_plan(config.tie_embeddings, sequence_parallel) | {
        # Gathered once for both linear layers.
        "layers.*.mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "layers.*.mlp.linear_fc1_gate": ColwiseParallel(),
        "layers.*.mlp.linear_fc1_up": ColwiseParallel(),
    }


def _decoder_plan(tie_embeddings: bool, sequence_parallel: bool) -> Plan:
    """What decoder-only transformers have in common: attention by heads, the MLP's second layer, the vocabulary."""
    between, norm = _between_linear_layers(sequence_parallel), norm_style(sequence_parallel)
    return {
        "word_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.input_norm": norm,
        "layers.*.self_attention.linear_qkv": ColwiseParallel(input_layouts=between),
        "layers.*.self_attention.linear_proj": RowwiseParallel(output_layouts=between),
        "layers.*.pre_mlp_norm": norm,
        "layers.*.mlp.linear_fc2": RowwiseParallel(output_layouts=between),
        "final_norm": norm,
    } | ({} if tie_embeddings else {"output_layer": ShardedRows()})


def _between_linear_layers(sequence_parallel: bool) -> Placement:
    """How the tensor-parallel ranks hold activations [B, S, H] between linear layers."""
    return Shard(1) if sequence_parallel else Replicate()
