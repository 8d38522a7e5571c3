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
    yarn_beta_slow: float = flag(
        1.0, "YaRN's beta_slow: channels that rotate no more often than this are stretched", above=0
    )
    window_size: str | None = flag(
        None, "a token attends to LEFT tokens before it, and to RIGHT = 0 after it; default all", metavar="LEFT,RIGHT"
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary up to a multiple of this", at_least=1)
    normalization: str | None = flag(
        None,
        "norms before the sublayers; default: the architecture's",
        choices=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm"),
    )
    norm_epsilon: float = flag(1e-5, "epsilon of LayerNorm and RMSNorm", at_least=1e-37)
    apply_layernorm_1p: bool = flag(False, "norms multiply by 1 + weight")
    qk_layernorm: bool = flag(False, "norms of each head's queries and keys")
    swiglu: bool = flag(False, "SwiGLU in the MLP, not GELU; always with pretrain_llama.py")
    no_bias_gelu_fusion: bool = flag(
        False,
        "GELU by the error function, as Megatron computes it without its fused kernel; default its tanh approximation",
    )
    disable_bias_linear: bool = flag(False, "linear layers without bias; always with pretrain_llama.py")
    add_qkv_bias: bool = flag(False, "with --disable-bias-linear: queries, keys and values have biases all the same")
    num_experts: int | None = flag(
        None, "experts in place of the MLP, of which each token has a few; default: an MLP", at_least=2, at_most=2**10
    )
    moe_layer_freq: int = flag(1, "put experts in every k-th block", needs="num_experts", at_least=1)
    moe_first_layer: int = flag(1, "the first block with experts, counted from 1", needs="num_experts", at_least=1)
    moe_experts_per_layer: str | None = flag(
        None, "such as 32,32,64: experts of each block that has some; default: all alike", needs="num_experts"
    )
    moe_residual: bool = flag(
        False,
        "weigh the MLP, or the expert that has all tokens, against a token's experts (Megatron-DeepSpeed's residual)",
        needs="num_experts",
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert; default --ffn-hidden-size", needs="num_experts", at_least=1, at_most=2**26
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of an expert that has all tokens; default: there is none", needs="num_experts", at_least=1
    )
    moe_router_topk: int = flag(2, "experts that a token goes to", needs="num_experts", at_least=1)
    moe_router_score_function: str = flag(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid"), needs="num_experts"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "with sigmoid: balance experts by biases of their scores, which follow their load", needs="num_experts"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "what such a bias moves in a step", needs="moe_router_enable_expert_bias", above=0
    )
    moe_router_pre_softmax: bool = flag(
        False, "softmax over all experts, so that the weights of a token's do not add up to 1", needs="num_experts"
    )
    moe_router_topk_scaling_factor: float = flag(
        1.0, "multiply the weights of a token's experts", needs="num_experts", above=0
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss", "what spreads tokens over experts", choices=("aux_loss", "none"), needs="num_experts"
    )
    moe_aux_loss_coeff: float = flag(0.0, "coefficient of the balancing loss, as 0.01", needs="num_experts", at_least=0)
    moe_z_loss_coeff: float = flag(0.0, "coefficient of the router's z-loss, as 0.001", needs="num_experts", at_least=0)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "drop tokens beyond this multiple of an expert's even share; default: drop none",
        needs="num_experts",
        above=0,
        at_most=2**10,
    )
    moe_eval_capacity_factor: float | None = flag(
        None,
        "the same in evaluations; default: as in training",
        needs="moe_expert_capacity_factor",
        above=0,
        at_most=2**10,
    )
    moe_min_capacity: int = flag(
        1, "tokens that an expert takes in any case", needs="moe_expert_capacity_factor", at_least=1, at_most=2**31
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", above=0)
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
