"""The parts of a decoder, each declared once: a field here is a flag of the trainer, and a field of the model's config.

Flags have Megatron's names. ``ModelSettings`` adds flags that a config does not keep as they are typed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_zpp.fields import flag

_advanced = partial(flag, tier="advanced")
_latent = partial(flag, needs="multi_latent_attention")


def _expert(name: str, default: Any, help: str, needs: str = "num_experts", **options: Any) -> Any:
    return flag(default, help, name=name, needs=needs, **options)


@dataclass(frozen=True, kw_only=True)
class DecoderFlags:
    """Flags that ``DecoderConfig`` keeps as they are typed. None: the architecture's default, which it fills in."""

    ffn_hidden_size: int | None = flag(None, "width of the MLP; default: the architecture's", at_least=1, at_most=2**26)
    kv_channels: int | None = flag(None, "width of one head; default hidden / heads", at_least=1, at_most=2**16)
    position_embedding_type: str | None = flag(
        None,
        "kind of positions; yarn: rope stretched by YaRN; default: the architecture's",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_base: float = flag(10000.0, "base of the rotary embedding", at_least=1)
    rotary_base_local: float | None = flag(
        None,
        "rotary base in blocks with a window, where frequencies are not scaled; default: --rotary-base",
        at_least=1,
    )
    no_rope_freq: str | None = flag(
        None, "blocks without rotary positions: k for every k-th, or a list with 1 for them, as [0]*3+[1]*1"
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "divide rotary frequencies by this (linear scaling)", above=0
    )
    rotary_percent: float = flag(1.0, "share of each head's channels that are rotated", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighboring channels together, not those half a head apart")
    yarn_scaling_factor: float | None = flag(
        None,
        "YaRN: factor that extends the context",
        aliases=("--rotary-scaling-factor",),
        at_least=1,
        name="--yarn-rotary-scaling-factor",
    )
    yarn_original_context: int | None = flag(
        None,
        "context before extension, by YaRN or by --use-rope-scaling (default 8192)",
        aliases=("--original-max-position-embeddings",),
        at_least=1,
        name="--yarn-original-max-position-embeddings",
    )
    yarn_beta_fast: float = flag(
        32.0, "YaRN beta_fast: channels that rotate more often stay unscaled", aliases=("--beta-fast",), above=0
    )
    yarn_beta_slow: float = flag(
        1.0, "YaRN beta_slow: channels that rotate no more often are stretched", aliases=("--beta-slow",), above=0
    )
    no_yarn_correction_range_round_to_int: bool = flag(False, "YaRN: stretch between exact bounds, not whole channels")
    mscale: float = flag(1.0, "YaRN: size of queries and keys, relative to --mscale-all-dim's", at_least=0)
    mscale_all_dim: float = flag(0.0, "YaRN: size of latent attention's scores, as --mscale", at_least=0)
    multi_latent_attention: bool = flag(False, "queries, keys and values from latent vectors (DeepSeek's MLA)")
    q_lora_rank: int | None = _latent(None, "width of the queries' latent vectors; default: none", at_least=1)
    kv_lora_rank: int = _latent(32, "width of the latent vectors of keys and values", at_least=1)
    qk_head_dim: int = _latent(128, "width of a head's queries and keys without positions", at_least=1)
    qk_pos_emb_head_dim: int = _latent(64, "width of a head's queries and keys with positions", at_least=2)
    v_head_dim: int = _latent(128, "width of a head's values; at most its keys' width", at_least=1)
    latent_norm_epsilon: float | None = _latent(
        None, "epsilon of the norms of latent vectors; default --norm-epsilon", at_least=1e-37
    )
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
    normalization: str | None = flag(
        None, "norms; default: the architecture's", choices=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm")
    )
    norm_epsilon: float = flag(1e-5, "epsilon of LayerNorm and RMSNorm", at_least=1e-37)
    layernorm_1p: bool = flag(False, "norms multiply by 1 + weight", name="--apply-layernorm-1p")
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
    add_qkv_bias: bool = flag(False, "with --disable-bias-linear: biases for queries, keys and values all the same")
    attention_bias: bool = _advanced(False, "with --disable-bias-linear: biases in attention all the same")
    mlp_bias: bool = _advanced(False, "with --disable-bias-linear: biases in MLPs all the same")
    use_parallel_residual: bool = _advanced(False, "attention and MLP of a block read the same input, as GPT-NeoX's do")
    moe_first_layer: int = _expert("--moe-first-layer", 1, "first block with experts, counted from 1", at_least=1)
    moe_experts_per_layer: str | None = _expert(
        "--moe-experts-per-layer", None, "experts of each block that has some, as 32,32,64"
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", above=0, resume="free")
    attention_dropout: float | None = flag(
        None, "attention dropout; default: the architecture's", at_least=0, below=1, resume="noted"
    )
    hidden_dropout: float | None = flag(
        None, "dropout of embeddings and residuals; default: the architecture's", at_least=0, below=1, resume="noted"
    )


@dataclass(frozen=True, kw_only=True)
class ExpertFlags:
    """Flags that ``MoEConfig`` keeps as they are typed."""

    residual: bool = _expert(
        "--moe-residual",
        False,
        "weigh the MLP or shared expert against a token's experts (Megatron-DeepSpeed's residual experts)",
    )
    shared_expert_size: int | None = _expert(
        "--moe-shared-expert-intermediate-size",
        None,
        "width of the shared expert, which sees all tokens; default: there is none",
        at_least=1,
    )
    shared_expert_gate: bool = _expert(
        "--moe-shared-expert-gate",
        False,
        "weigh the shared expert by a sigmoid that is learned",
        needs="shared_expert_size",
    )
    router_num_groups: int | None = _expert("--moe-router-num-groups", None, "divide experts into groups", at_least=1)
    router_group_topk: int | None = _expert(
        "--moe-router-group-topk",
        None,
        "groups that the experts of a token come from",
        needs="router_num_groups",
        at_least=1,
    )
    router_bias: bool = _expert("--moe-router-bias", False, "a bias in the router")
    router_topk: int = _expert("--moe-router-topk", 2, "experts per token", at_least=1)
    score_function: str = _expert(
        "--moe-router-score-function", "softmax", "scores from router logits", choices=("softmax", "sigmoid")
    )
    router_pre_softmax: bool = _expert(
        "--moe-router-pre-softmax",
        False,
        "softmax over all experts, so that a token's weights do not sum to 1",
        effective_with="moe_router_score_function=softmax",
    )
    topk_scaling_factor: float = _expert(
        "--moe-router-topk-scaling-factor", 1.0, "multiply the weights of a token's experts", above=0
    )
    load_balancing: str = _expert(
        "--moe-router-load-balancing-type",
        "aux_loss",
        "balance experts by a loss over micro-batches, by one over samples (seq_) or over all layers at once "
        "(all_layers_, transformers'), or by sinkhorn's transport",
        choices=("aux_loss", "seq_aux_loss", "all_layers_aux_loss", "sinkhorn", "none"),
    )
    aux_loss_coeff: float = _expert(
        "--moe-aux-loss-coeff", 0.0, "coefficient of the balancing loss, as 0.01", at_least=0
    )
    z_loss_coeff: float = _expert("--moe-z-loss-coeff", 0.0, "coefficient of the router's z-loss, as 0.001", at_least=0)
    expert_capacity_factor: float | None = _expert(
        "--moe-expert-capacity-factor",
        None,
        "drop tokens beyond this multiple of an expert's even share; default: none",
        above=0,
        at_most=1024,
    )
    eval_capacity_factor: float | None = _expert(
        "--moe-eval-capacity-factor",
        None,
        "the same in evaluations; default: equal",
        needs="expert_capacity_factor",
        above=0,
        at_most=1024,
    )
    min_capacity: int = _expert(
        "--moe-min-capacity",
        1,
        "tokens that an expert always takes",
        needs="expert_capacity_factor",
        at_least=1,
        at_most=2**31,
    )
