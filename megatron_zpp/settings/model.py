"""Settings of the network, its precision and its activations."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_zpp.fields import flag

_expert = partial(flag, needs="num_experts")
_scaled = partial(flag, effective_with="fp16")
_latent = partial(flag, needs="multi_latent_attention")


@dataclass(frozen=True)
class ModelSettings:
    """The network."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="model")
    preset: str | None = flag(
        None, "published model of this architecture whose shape to use; other flags override it", resume="free"
    )
    num_layers: int | None = flag(None, "number of transformer blocks", at_least=1, at_most=10_000)
    hidden_size: int | None = flag(None, "width of the residual stream", at_least=1, at_most=2**24)
    ffn_hidden_size: int | None = flag(None, "width of the MLP; default: the architecture's", at_least=1, at_most=2**26)
    num_attention_heads: int | None = flag(None, "number of query heads", at_least=1, at_most=2**16)
    kv_channels: int | None = flag(None, "width of one head; default hidden / heads", at_least=1, at_most=2**16)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(None, "number of key/value heads", needs="group_query_attention", at_least=1)
    max_position_embeddings: int | None = flag(
        None, "longest sequence that the model can take; default --seq-length", at_least=1, at_most=2**27
    )
    position_embedding_type: str | None = flag(
        None,
        "kind of positions; yarn: rope stretched by YaRN; default: the architecture's",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rope_type: str | None = flag(
        None,
        "positions of latent attention; default: yarn where --yarn-rotary-scaling-factor is above 1",
        choices=("rope", "yarn"),
        needs="multi_latent_attention",
    )
    rotary_base: int = flag(10000, "base of the rotary embedding", at_least=1)
    rotary_base_local: int | None = flag(
        None, "rotary base in blocks with a window, where frequencies are not scaled; default: alike", at_least=1
    )
    no_rope_freq: str | None = flag(
        None, "blocks without rotary positions: k for every k-th, or a list with 1 for them, as [0]*3+[1]*1"
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "divide rotary frequencies by this (linear scaling)", above=0
    )
    rotary_percent: float = flag(1.0, "share of each head's channels that are rotated", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighboring channels together, not those half a head apart")
    use_rope_scaling: bool = flag(False, "scale low rotary frequencies as Llama 3.1, for more than 8192 tokens")
    rope_scaling_factor: float = flag(
        8.0, "factor by which --use-rope-scaling divides frequencies", above=0, effective_with="use_rope_scaling"
    )
    yarn_rotary_scaling_factor: float | None = flag(
        None, "YaRN: factor that extends the context", aliases=("--rotary-scaling-factor",), at_least=1
    )
    yarn_original_max_position_embeddings: int | None = flag(
        None, "YaRN: context before extension", aliases=("--original-max-position-embeddings",), at_least=1
    )
    yarn_beta_fast: float = flag(
        32.0, "YaRN beta_fast: channels that rotate more often stay unscaled", aliases=("--beta-fast",), above=0
    )
    yarn_beta_slow: float = flag(
        1.0, "YaRN beta_slow: channels that rotate no more often are stretched", aliases=("--beta-slow",), above=0
    )
    no_yarn_correction_range_round_to_int: bool = flag(False, "YaRN: stretch between exact bounds, not whole channels")
    mscale: float = flag(1.0, "YaRN: size of queries and keys, relative to that of --mscale-all-dim", at_least=0)
    mscale_all_dim: float = flag(0.0, "YaRN: size of latent attention's scores, as --mscale", at_least=0)
    multi_latent_attention: bool = flag(False, "queries, keys and values from latent vectors (DeepSeek's MLA)")
    q_lora_rank: int | None = _latent(None, "width of the queries' latent vectors; default: none", at_least=1)
    kv_lora_rank: int = _latent(32, "width of the latent vectors of keys and values", at_least=1)
    qk_head_dim: int = _latent(128, "width of a head's queries and keys without positions", at_least=1)
    qk_pos_emb_head_dim: int = _latent(64, "width of a head's queries and keys with positions", at_least=2)
    v_head_dim: int = _latent(128, "width of a head's values; at most that of its keys", at_least=1)
    latent_norm_epsilon: float | None = _latent(
        None, "epsilon of the norms of latent vectors; default --norm-epsilon", at_least=1e-37
    )
    window_size: str | None = flag(None, "tokens before and after (0) to attend to; default all", metavar="LEFT,RIGHT")
    window_attn_skip_freq: str | None = flag(
        None, "blocks without the window: k for every k-th, or a list with 0 for them", needs="window_size"
    )
    softmax_scale: float | None = flag(None, "factor of attention scores; default 1 / sqrt(width of a head)", above=0)
    softmax_type: str = flag(
        "vanilla", "learnable: a learned score lets a head attend to nothing (sinks)", choices=("vanilla", "learnable")
    )
    attn_logit_softcapping: float | None = flag(None, "bound attention scores s: c * tanh(s / c)", above=0)
    final_logit_softcapping: float | None = flag(None, "bound the model's logits in the same way", above=0)
    embedding_multiplier: float = flag(1.0, "multiply embeddings by this", above=0)
    residual_multiplier: float = flag(1.0, "multiply what attention and MLP add to the residual stream", above=0)
    logits_scaling: float = flag(1.0, "divide the model's logits by this", above=0)
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary up to a multiple of this", at_least=1)
    padded_vocab_size: int | None = flag(
        None, "size of the vocabulary with its padding, in place of --make-vocab-size-divisible-by", at_least=1
    )
    normalization: str | None = flag(
        None, "norms; default: the architecture's", choices=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm")
    )
    norm_epsilon: float = flag(1e-5, "epsilon of LayerNorm and RMSNorm", at_least=1e-37)
    apply_layernorm_1p: bool = flag(False, "norms multiply by 1 + weight")
    qk_layernorm: bool = flag(False, "normalize each head's queries and keys")
    qk_layernorm_whole: bool = flag(False, "normalize all heads at once, not each", needs="qk_layernorm")
    no_pre_norms: bool = flag(False, "no norms before attention and MLP; needs the two norms after them")
    post_self_attn_layernorm: bool = flag(False, "normalize what attention adds to the residual stream")
    post_mlp_layernorm: bool = flag(False, "normalize what the MLP adds to the residual stream")
    geglu: bool = flag(False, "a gate with GELU in the MLP")
    quick_geglu: bool = flag(False, "a gate with x * sigmoid(1.702 x) in the MLP")
    squared_relu: bool = flag(False, "squared ReLU in the MLP instead of GELU")
    glu_linear_offset: float = flag(0.0, "add this to what a gate multiplies", at_least=0)
    activation_func_clamp_value: float | None = flag(None, "bound gates, and what they multiply, by this", above=0)
    swiglu: bool = flag(False, "SwiGLU in the MLP instead of GELU; always with pretrain_llama.py")
    no_bias_gelu_fusion: bool = flag(False, "exact GELU (erf), as Megatron unfused; default the tanh approximation")
    disable_bias_linear: bool = flag(False, "linear layers without bias; always with pretrain_llama.py")
    add_qkv_bias: bool = flag(False, "with --disable-bias-linear: biases for queries, keys and values all the same")
    num_experts: int | None = flag(None, "experts per layer, instead of an MLP (MoE)", at_least=2, at_most=1024)
    moe_layer_freq: str | None = _expert(
        None, "put experts in every k-th block, or a list with 1 for these, as [0]*3+[1]*58; default: in all"
    )
    moe_first_layer: int = _expert(1, "first block with experts, counted from 1", at_least=1)
    moe_experts_per_layer: str | None = _expert(None, "experts of each block that has some, as 32,32,64")
    moe_residual: bool = _expert(
        False, "weigh the MLP or shared expert against a token's experts (Megatron-DeepSpeed's residual experts)"
    )
    moe_ffn_hidden_size: int | None = _expert(
        None, "width of an expert; default --ffn-hidden-size", at_least=1, at_most=2**26
    )
    moe_shared_expert_intermediate_size: int | None = _expert(
        None, "width of the shared expert, which sees all tokens; default: there is none", at_least=1
    )
    moe_shared_expert_gate: bool = flag(
        False, "weigh the shared expert by a sigmoid that is learned", needs="moe_shared_expert_intermediate_size"
    )
    moe_router_num_groups: int | None = _expert(None, "divide experts into groups", at_least=1)
    moe_router_group_topk: int | None = flag(
        None, "groups that the experts of a token come from", needs="moe_router_num_groups", at_least=1
    )
    moe_router_bias: bool = _expert(False, "a bias in the router")
    moe_router_topk: int = _expert(2, "experts per token", at_least=1)
    moe_router_score_function: str = _expert("softmax", "scores from router logits", choices=("softmax", "sigmoid"))
    moe_router_enable_expert_bias: bool = _expert(False, "with sigmoid: balance experts by biases that follow load")
    moe_router_bias_update_rate: float = flag(
        1e-3, "change of a score bias per step", needs="moe_router_enable_expert_bias", at_least=0
    )
    moe_router_pre_softmax: bool = _expert(
        False,
        "softmax over all experts, so that a token's weights do not sum to 1",
        effective_with="moe_router_score_function=softmax",
    )
    moe_router_topk_scaling_factor: float = _expert(1.0, "multiply the weights of a token's experts", above=0)
    moe_router_load_balancing_type: str = _expert(
        "aux_loss",
        "balance experts by a loss over micro-batches, by one over samples (seq_) or over all layers at once "
        "(all_layers_, transformers'), or by sinkhorn's transport",
        choices=("aux_loss", "seq_aux_loss", "all_layers_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: float = _expert(0.0, "coefficient of the balancing loss, as 0.01", at_least=0)
    moe_z_loss_coeff: float = _expert(0.0, "coefficient of the router's z-loss, as 0.001", at_least=0)
    moe_expert_capacity_factor: float | None = _expert(
        None, "drop tokens beyond this multiple of an expert's even share; default: none", above=0, at_most=1024
    )
    moe_eval_capacity_factor: float | None = flag(
        None, "the same in evaluations; default: equal", needs="moe_expert_capacity_factor", above=0, at_most=1024
    )
    moe_min_capacity: int = flag(
        1, "tokens that an expert always takes", needs="moe_expert_capacity_factor", at_least=1, at_most=2**31
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", above=0, resume="free")
    attention_dropout: float | None = flag(
        None, "attention dropout; default: the architecture's", at_least=0, below=1, resume="noted"
    )
    hidden_dropout: float | None = flag(
        None, "dropout of embeddings and residuals; default: the architecture's", at_least=0, below=1, resume="noted"
    )
    untie_embeddings_and_output_weights: bool = flag(False, "separate output layer; default: the architecture's")
    tie_embeddings_and_output_weights: bool = flag(False, "embeddings as output layer; default: the architecture's")


@dataclass(frozen=True)
class PrecisionSettings:
    """Mixed precision. Parameters and optimizer state stay in fp32; this is the dtype of computing and sending."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="noted")
    bf16: bool = flag(False, "compute in bfloat16")
    fp16: bool = flag(False, "compute in float16, with loss scaling")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; default with --bf16, unless --zero-quantized-gradients quantizes both hops"
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bfloat16 (quantized ones sum in fp32)", needs="bf16")
    loss_scale: float | None = _scaled(None, "fixed loss scale of --fp16; default dynamic", above=0)
    initial_loss_scale: float = _scaled(2.0**32, "first dynamic loss scale", above=0, resume="free")
    min_loss_scale: float = _scaled(1.0, "smallest dynamic loss scale", above=0)
    loss_scale_window: int = _scaled(1000, "clean steps after which the loss scale doubles", at_least=1)
    hysteresis: int = _scaled(2, "overflows before the loss scale is halved", at_least=1)
    fp8_format: str | None = flag(
        None,
        "products of blocks' linear layers in float8, by torchao: gradients in e5m2 (hybrid) or all in e4m3",
        choices=("hybrid", "e4m3"),
        needs="bf16",
    )
    fp8_recipe: str | None = flag(
        None,
        "scales of whole tensors (hybrid, its default), or of rows (e4m3, its default); with_gw_hp: weight gradients "
        "in bf16",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        effective_with="fp8_format",
    )
    first_last_layers_bf16: bool = flag(False, "no float8 in the first and last layers", effective_with="fp8_format")


@dataclass(frozen=True)
class ActivationSettings:
    """Activation checkpointing and compilation."""

    FLAGS: ClassVar[dict[str, str]] = dict(settles="recompute")
    recompute_granularity: str | None = flag(
        None,
        "full: whole blocks; selective (--recompute-activations): keep matrix products, recompute the rest",
        choices=("full", "selective"),
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "with selective: keep all but what these modules compute, and recompute them",
        nargs="+",
        choices=("core_attn", "mlp", "moe", "shared_experts"),
        effective_with="recompute_granularity=selective",
    )
    recompute_method: str | None = flag(
        None,
        "checkpoint every --recompute-num-layers blocks as one (uniform), or the first of them alone (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "see --recompute-method; default 1", at_least=1)
    compile: bool = flag(False, "torch.compile each block, and the loss between its matrix products", settles="")
    activation_memory_budget: float | None = flag(
        None,
        "share of activations that torch.compile keeps, 0 for the blocks' inputs alone; it recomputes the cheapest",
        needs="compile",
        at_least=0,
        at_most=1,
        settles="",
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "keep in host memory what the first layers (of each stage) save for the backward pass",
        at_least=0,
        tier="advanced",
    )
