"""Settings of the network, its precision and its activations."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_zpp.fields import flag
from megatron_zpp.models.decoder_flags import DecoderFlags, ExpertFlags

_expert = partial(flag, needs="num_experts")
_scaled = partial(flag, effective_with="fp16")


@dataclass(frozen=True)
class ShapeSettings:
    """The shape of every architecture's models."""

    preset: str | None = flag(
        None,
        "published model of this architecture whose shape to use; other flags override it",
        resume="free",
        first="The model",
    )
    num_layers: int | None = flag(None, "number of transformer blocks", at_least=1, at_most=10_000, first="The model")
    hidden_size: int | None = flag(None, "width of the residual stream", at_least=1, at_most=2**24, first="The model")
    num_attention_heads: int | None = flag(None, "number of query heads", at_least=1, at_most=2**16, first="The model")
    max_position_embeddings: int | None = flag(
        None, "longest sequence that the model can take; default --seq-length", at_least=1, at_most=2**27
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary up to a multiple of this", at_least=1)
    padded_vocab_size: int | None = flag(
        None, "size of the vocabulary with its padding, in place of --make-vocab-size-divisible-by", at_least=1
    )


@dataclass(frozen=True)
class ModelSettings(ExpertFlags, DecoderFlags, ShapeSettings):  # fields in the order of --help: the last base's first
    """The network."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="model")
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(None, "number of key/value heads", needs="group_query_attention", at_least=1)
    rope_type: str | None = flag(
        None,
        "positions of latent attention; default: yarn where --yarn-rotary-scaling-factor is above 1",
        choices=("rope", "yarn"),
        needs="multi_latent_attention",
    )
    use_rope_scaling: bool = flag(False, "scale low rotary frequencies as Llama 3.1, for more than 8192 tokens")
    rope_scaling_factor: float = flag(
        8.0, "factor by which --use-rope-scaling divides frequencies", above=0, effective_with="use_rope_scaling"
    )
    window_size: str | None = flag(None, "tokens before and after (0) to attend to; default all", metavar="LEFT,RIGHT")
    no_bias_gelu_fusion: bool = flag(False, "exact GELU (erf), as Megatron unfused; default the tanh approximation")
    disable_bias_linear: bool = flag(False, "linear layers without bias; always with pretrain_llama.py")
    num_experts: int | None = flag(None, "experts per layer, instead of an MLP (MoE)", at_least=2, at_most=1024)
    moe_layer_freq: str | None = _expert(
        None, "put experts in every k-th block, or a list with 1 for these, as [0]*3+[1]*58; default: in all"
    )
    moe_ffn_hidden_size: int | None = _expert(
        None, "width of an expert; default --ffn-hidden-size", at_least=1, at_most=2**26
    )
    moe_router_enable_expert_bias: bool = _expert(False, "with sigmoid: balance experts by biases that follow load")
    moe_router_bias_update_rate: float = flag(
        1e-3, "change of a score bias per step", needs="moe_router_enable_expert_bias", at_least=0
    )
    untie_embeddings_and_output_weights: bool = flag(False, "separate output layer; default: the architecture's")
    tie_embeddings_and_output_weights: bool = flag(False, "embeddings as output layer; default: the architecture's")


@dataclass(frozen=True)
class PrecisionSettings:
    """Mixed precision. Parameters and optimizer state stay in fp32; this is the dtype of computing and sending."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="noted")
    bf16: bool = flag(False, "compute in bfloat16", deepspeed="bf16.enabled", first="Training")
    fp16: bool = flag(False, "compute in float16, with loss scaling", deepspeed="fp16.enabled")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; default with --bf16, unless --zero-quantized-gradients quantizes both hops"
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bfloat16 (quantized ones sum in fp32)", needs="bf16")
    loss_scale: float | None = _scaled(None, "fixed loss scale of --fp16; default dynamic", above=0)
    initial_loss_scale: float = _scaled(2.0**32, "first dynamic loss scale", at_least=1, resume="free")
    loss_scale_window: int = _scaled(
        1000, "clean steps after which the loss scale doubles", at_least=1, deepspeed="fp16.loss_scale_window"
    )
    hysteresis: int = _scaled(2, "overflows before the loss scale is halved", at_least=1, deepspeed="fp16.hysteresis")
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

    FLAGS: ClassVar[dict[str, str]] = dict(settles="recompute", resume="free")
    recompute_granularity: str | None = flag(
        None, "full: whole blocks; selective: keep matrix products, recompute the rest", choices=("full", "selective")
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
    compile: bool = flag(
        False, "torch.compile each block, and the loss between its matrix products", settles="", first="Training"
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "keep in host memory what the first layers (of each stage) save for the backward pass",
        at_least=0,
        tier="advanced",
    )
