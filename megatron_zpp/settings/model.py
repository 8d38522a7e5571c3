"""Settings of the network, its precision and its activations."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.settings.flags import flag


@dataclass(frozen=True)
class ModelSettings:
    """The network."""

    preset: str | None = flag(None, "published model of this architecture whose shape to use; other flags override it")
    num_layers: int | None = flag(None, "number of transformer blocks", at_least=1, at_most=10_000)
    hidden_size: int | None = flag(None, "width of the residual stream", at_least=1, at_most=2**24)
    ffn_hidden_size: int | None = flag(None, "width of the MLP; default: the architecture's", at_least=1, at_most=2**26)
    num_attention_heads: int | None = flag(None, "number of query heads", at_least=1, at_most=2**16)
    kv_channels: int | None = flag(None, "width of one head; default hidden / heads", at_least=1, at_most=2**16)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(
        None, "number of key/value heads with --group-query-attention", needs="group_query_attention", at_least=1
    )
    max_position_embeddings: int | None = flag(
        None, "longest sequence that the model can take; default --seq-length", at_least=1, at_most=2**27
    )
    position_embedding_type: str | None = flag(
        None,
        "kind of positions; yarn is rope that YaRN stretches; default: the architecture's",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_base: int = flag(10000, "base of the rotary embedding", at_least=1)
    rotary_percent: float = flag(1.0, "share of each head's channels that are rotated", above=0, at_most=1)
    use_rope_scaling: bool = flag(
        False, "divide low rotary frequencies as Llama 3.1 does, for sequences beyond 8192 tokens"
    )
    rope_scaling_factor: float = flag(8.0, "what --use-rope-scaling divides by", above=0)
    yarn_rotary_scaling_factor: float | None = flag(
        None, "how many times the original context yarn reaches", at_least=1
    )
    yarn_original_max_position_embeddings: int | None = flag(
        None, "context that the model was trained with before yarn", at_least=1
    )
    yarn_beta_fast: float = flag(
        32.0, "YaRN's beta_fast: channels that rotate more often within the original context stay unscaled", above=0
    )
    attention_dropout: float | None = flag(
        None, "dropout of attention weights; default: the architecture's", at_least=0, below=1
    )
    hidden_dropout: float | None = flag(
        None, "dropout of embeddings and residuals; default: the architecture's", at_least=0, below=1
    )
    untie_embeddings_and_output_weights: bool = flag(False, "separate output layer; default: the architecture's")
    tie_embeddings_and_output_weights: bool = flag(
        False, "the embeddings are the output layer too; default: the architecture's"
    )


@dataclass(frozen=True)
class PrecisionSettings:
    """Mixed precision. Parameters and optimizer state stay in fp32; this is the dtype of computing and sending."""

    bf16: bool = flag(False, "compute in bfloat16")
    fp16: bool = flag(False, "compute in float16, with loss scaling")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; default with --bf16, unless --zero-quantized-gradients quantizes both hops"
    )
    grad_reduce_in_bf16: bool = flag(
        False, "reduce gradients in bfloat16; quantized ones are handed over in it and added up in fp32"
    )
    loss_scale: float | None = flag(None, "fixed loss scale of --fp16; default dynamic", above=0)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", above=0)
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", above=0)
    loss_scale_window: int = flag(1000, "clean steps after which the loss scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows before the loss scale is halved", at_least=1)


@dataclass(frozen=True)
class ActivationSettings:
    """Activation checkpointing and compilation."""

    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    recompute_granularity: str | None = flag(
        None, "full: whole blocks; selective: keep matrix products, recompute the rest", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None,
        "uniform: every --recompute-num-layers blocks are one checkpoint; "
        "block: the first --recompute-num-layers blocks are checkpointed",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "see --recompute-method; default 1", at_least=1)
    checkpoint_activations: bool = flag(False, "DeepSpeed's name for --recompute-granularity full")
    compile: bool = flag(False, "torch.compile each block")
