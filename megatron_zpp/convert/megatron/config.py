"""The flags that Megatron keeps in its checkpoints, and the config that they are here, both ways."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.meta import Counters, check_config
from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.families.decoder_only import NORMALIZATIONS
from megatron_zpp.models.decoder import DecoderConfig, default_ffn_size
from megatron_zpp.models.moe import MoEConfig

from .neutral_flags import NEUTRAL
from .pickles import StandIn

Args = Mapping[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's


@dataclass(frozen=True)
class Saved:
    """Tensors are what a Megatron on one rank would have, by their names in ``weights``."""

    path: str  # for messages
    kind: str  # likewise
    args: Args
    state: Mapping[str, Any]  # what stands beside the tensors
    names: frozenset[str]  # of the parameters
    # Of a parameter's name and "" or one of MOMENTS. Raises CheckpointError.
    read: Callable[[str, str], Tensor]
    moments: bool  # whether they are there whole
    steps: Callable[[str], int | None] = lambda name: None  # that Adam has made with a parameter, where it is known


def args_in(state: Any, path: str) -> Args:
    """Return the flags of the run. Raises CheckpointError."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise CheckpointError(f"{path} does not hold the flags of its run (args): it is none of Megatron's trainer")
    return vars(args)


def counters_of(saved: Saved) -> Counters:
    """Read the run's counters. Raises CheckpointError for what is no number."""
    args, state = saved.args, saved.state
    scheduler = state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}
    samples = args.get("consumed_train_samples", 0)
    values = {
        "iteration": state.get("iteration", args.get("iteration", 0)),
        "consumed_train_samples": samples,
        "consumed_valid_samples": args.get("consumed_valid_samples", 0),
        "scheduled_samples": scheduler.get("num_steps", samples) if isinstance(scheduler, dict) else samples,
    }
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**53:
            raise CheckpointError(f"{saved.path} is damaged: its {name} is {value!r}")
    return Counters(**values)


# Flags that change the model, and the values that ours has; one that an older version lacks had the first.
_OURS: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "embed_layernorm": (False,),
    "experimental_attention_variant": (None,),
    "glu_activation": (None, "swiglu"),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (False,),
    "linear_attention_type": (None,),
    "mlp_type": ("standard",),
    "moe_apply_probs_on_input": (False,),
    "moe_input_jitter_eps": (None, 0.0),
    "moe_latent_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_group_topk": (None,),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_router_num_groups": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_shared_expert_gate": (False,),
    "moe_token_drop_policy": ("probs",),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "openai_gelu": (False,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "scale_normalization": (None,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "use_mup": (False,),
    "window_attn_skip_freq": (None,),
}
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_OF_DEEPSPEED = {1: "rope", 2: "learned_absolute", 3: "alibi"}  # members of its enumeration

# Fields that mean the same here and there: ours, Megatron's flag, and what a version without the flag does.
_SAME: tuple[tuple[str, str, Any], ...] = (
    ("layernorm_1p", "apply_layernorm_1p", False),
    ("qk_layernorm", "qk_layernorm", False),
    ("add_bias_linear", "add_bias_linear", True),
    ("attention_dropout", "attention_dropout", 0.1),
    ("hidden_dropout", "hidden_dropout", 0.1),
    ("init_method_std", "init_method_std", 0.02),
)
_SAME_OF_ROTARY: tuple[tuple[str, str, Any], ...] = (
    ("rotary_percent", "rotary_percent", 1.0),
    ("rotary_base", "rotary_base", 10000),
)
_SAME_OF_YARN: tuple[tuple[str, str, Any], ...] = (
    ("yarn_scaling_factor", "yarn_rotary_scaling_factor", None),
    ("yarn_original_context", "yarn_original_max_position_embeddings", None),
    ("yarn_beta_fast", "yarn_beta_fast", 32.0),
    ("yarn_beta_slow", "yarn_beta_slow", 1.0),
)
_SAME_OF_EXPERTS: tuple[tuple[str, str, Any], ...] = (
    ("router_topk", "moe_router_topk", 2),
    ("score_function", "moe_router_score_function", "softmax"),
    ("router_pre_softmax", "moe_router_pre_softmax", False),
    ("aux_loss_coeff", "moe_aux_loss_coeff", 0.0),
    ("expert_capacity_factor", "moe_expert_capacity_factor", None),
    ("shared_expert_size", "moe_shared_expert_intermediate_size", None),
)
_DECODER = (*_SAME, *_SAME_OF_ROTARY, *_SAME_OF_YARN)
# Fields that ``config_of`` and ``args_of`` compute, and flags from which they do.
_COMPUTED = """
num_layers hidden_size num_attention_heads vocab_size max_position_embeddings ffn_hidden_size num_query_groups
kv_channels normalization norm_epsilon swiglu exact_gelu add_qkv_bias window_size position_embedding_type
rope_scaling_factor tie_embeddings
"""
_FLAGS = """
num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups num_key_value_heads
kv_channels max_position_embeddings seq_length position_embedding_type add_position_embedding
use_rotary_position_embeddings use_rope_scaling rope_scaling_factor window_size normalization norm_epsilon
layernorm_epsilon swiglu bias_gelu_fusion add_qkv_bias untie_embeddings_and_output_weights num_experts moe_layer_freq
moe_ffn_hidden_size moe_router_topk_scaling_factor moe_z_loss_coeff
"""
_READ = {*_FLAGS.split(), *(flag for _, flag, _ in (*_DECODER, *_SAME_OF_EXPERTS))}


def config_of(args: Args, vocab_size: int) -> DecoderConfig:
    """Build the config of the model that these flags trained, its vocabulary padded to ``vocab_size``.

    Raises CheckpointError that names every flag whose value our model does not have, or that is no size.
    """
    wrong = [
        f"{name} is {_plain(args[name])!r}"
        for name, values in _OURS.items()
        if name in args and _plain(args[name]) not in values
    ]
    has_experts = _num_experts(args) is not None
    wrong += [
        f"{name} is {_plain(value)!r}, which is not known here"
        for name, value in args.items()
        if not (name in _OURS or name in _READ or name.startswith(NEUTRAL) or value in (None, False, 0, ""))
        and (has_experts or not name.startswith("moe_"))
    ]
    positions = _position_embedding(args)
    if positions not in _POSITIONS:
        wrong.append(f"position_embedding_type is {positions!r}")
    normalization = NORMALIZATIONS.get(str(args.get("normalization", "LayerNorm")).lower())
    if normalization is None:
        wrong.append(f"normalization is {args['normalization']!r}")
    window, layers_with_experts = args.get("window_size"), args.get("moe_layer_freq", 1)
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2 and window[1] in (0, -1)):
        wrong.append(f"window_size is {window!r}")
    if _num_experts(args) is not None and type(layers_with_experts) is not int:
        wrong.append(f"moe_layer_freq is {layers_with_experts!r}")
    if wrong:
        raise CheckpointError(f"our models do not have what these flags of the checkpoint ask for: {'; '.join(wrong)}")
    hidden, heads = size(args, "hidden_size"), size(args, "num_attention_heads")
    swiglu = bool(args.get("swiglu", False)) or args.get("glu_activation") == "swiglu"
    rotary = positions in ("rope", "yarn")
    try:
        config = DecoderConfig(
            num_layers=size(args, "num_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            vocab_size=vocab_size,
            max_position_embeddings=longest(args) if positions == "learned_absolute" else None,
            ffn_hidden_size=args.get("ffn_hidden_size") or default_ffn_size(hidden, swiglu),
            num_query_groups=_query_groups(args, heads),
            kv_channels=args.get("kv_channels") or hidden // heads,
            normalization=normalization or "",
            norm_epsilon=args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
            swiglu=swiglu,
            exact_gelu=not swiglu and args.get("bias_gelu_fusion", True) is False,
            add_qkv_bias=bool(args.get("add_qkv_bias", False)) and not args.get("add_bias_linear", True),
            window_size=None if window is None or window[0] == -1 else window[0],
            position_embedding_type=positions,
            rope_scaling_factor=(
                args.get("rope_scaling_factor", 8.0) if rotary and args.get("use_rope_scaling", False) else None
            ),
            **_values(args, _SAME),
            **_values(args if rotary else {}, _SAME_OF_ROTARY),
            **_values(args if positions == "yarn" else {}, _SAME_OF_YARN),
            tie_embeddings=not args.get("untie_embeddings_and_output_weights", False),
            moe=_experts(args),
            moe_layer_freq=layers_with_experts if _num_experts(args) is not None else 1,
        )
        check_config(dataclasses.asdict(config), DecoderConfig)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's flags describe no model ({error})") from error
    return config


def architecture_of(config: DecoderConfig) -> Architecture:
    """Return LLAMA or GPT, whichever describes the model in fewer flags."""
    is_llama = config.normalization == "RMSNorm" and config.swiglu and config.position_embedding_type == "rope"
    return LLAMA if is_llama else GPT


def longest(args: Args) -> int:
    """Return the longest sequence that the model takes."""
    return size(args, "max_position_embeddings" if args.get("max_position_embeddings") else "seq_length")


def size(args: Args, name: str, default: int | None = None) -> int:
    """Return a flag that is a number from 1 on. Raises CheckpointError."""
    value = args.get(name, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"the checkpoint's flag {name} is {value!r}, not a size")
    return value


def _plain(value: Any) -> Any:
    """A member of an enumeration as its value."""
    return value.args[0] if isinstance(value, StandIn) and value.args else value


def _position_embedding(args: Args) -> Any:
    if args.get("use_rotary_position_embeddings", False):
        return "rope"
    kind = args.get("position_embedding_type", "learned_absolute")
    if isinstance(kind, StandIn):
        kind = _OF_DEEPSPEED.get(_plain(kind))
    if kind == "learned_absolute" and args.get("add_position_embedding") is False:
        return "none"
    return kind


def _query_groups(args: Args, heads: int) -> int:
    if "num_key_value_heads" in args:  # Megatron-DeepSpeed's
        return args["num_key_value_heads"] or heads
    return (args.get("num_query_groups") or heads) if args.get("group_query_attention", False) else heads


def _values(args: Args, rows: tuple[tuple[str, str, Any], ...]) -> dict[str, Any]:
    """{our field: what the flags say}."""
    values = {field: (args.get(flag, default), default) for field, flag, default in rows}
    return {field: bool(value) if type(default) is bool else value for field, (value, default) in values.items()}


def _num_experts(args: Args) -> int | None:
    number = args.get("num_experts")
    if isinstance(number, list):  # Megatron-DeepSpeed's
        number = max(number, default=1)
    return None if number in (None, 0, 1) else number


def _experts(args: Args) -> MoEConfig | None:
    number = _num_experts(args)
    if number is None:
        return None
    return MoEConfig(
        num_experts=number,
        ffn_hidden_size=args.get("moe_ffn_hidden_size") or size(args, "ffn_hidden_size"),
        topk_scaling_factor=args.get("moe_router_topk_scaling_factor") or 1.0,
        z_loss_coeff=args.get("moe_z_loss_coeff") or 0.0,
        **_values(args, _SAME_OF_EXPERTS),
    )


def args_of(config: DecoderConfig, positions: int) -> argparse.Namespace:
    """Return Megatron-LM's flags of a config, as its checkpoints keep them. Raises ValueError for what it lacks."""
    if config.moe is not None:
        raise ValueError("a mixture of experts cannot be written for Megatron-LM yet")
    if not (config.swiglu or config.exact_gelu or config.add_bias_linear):
        raise ValueError("GELU without biases is the exact one in Megatron-LM, and here its tanh approximation")
    said = {*_COMPUTED.split()} | {field for field, _, _ in _DECODER}
    for field in dataclasses.fields(config):
        if field.name not in said and not field.name.startswith("moe") and getattr(config, field.name) != field.default:
            raise ValueError(f"{field.name} cannot be written for Megatron-LM")
    return argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=config.num_groups != config.num_attention_heads,
        num_query_groups=config.num_groups,
        kv_channels=config.head_dim,
        max_position_embeddings=positions,
        position_embedding_type=config.position_embedding_type,
        add_position_embedding=config.position_embedding_type == "learned_absolute",
        use_rope_scaling=config.rope_scaling_factor is not None,
        rope_scaling_factor=config.rope_scaling_factor or 8.0,
        window_size=None if config.window_size is None else (config.window_size, 0),
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        swiglu=config.swiglu,
        bias_gelu_fusion=not config.exact_gelu,
        add_qkv_bias=config.add_qkv_bias or config.add_bias_linear,
        untie_embeddings_and_output_weights=not config.tie_embeddings,
        padded_vocab_size=config.vocab_size,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        **{flag: getattr(config, field) for field, flag, _ in _DECODER},
    )
