"""Convert between Megatron's flags, which its checkpoints keep, and our model config."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.meta import Counters, config_from_json
from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.families.decoder_only import EXPERT_FLAGS, FLAGS, NORMALIZATIONS
from megatron_zpp.families.huggingface import require_fields
from megatron_zpp.models.decoder_config import DecoderConfig, default_ffn_size, read_pattern
from megatron_zpp.models.moe import MoEConfig

from .pickles import NAMES, StandIn

Args = Mapping[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
READ = frozenset(NAMES["read"].split())
NEUTRAL = tuple(" ".join(NAMES["neutral"].values()).split())


@dataclass(frozen=True)
class Saved:
    """An open checkpoint of Megatron. Tensors have their names in ``weights``, and are as on one rank."""

    path: str  # for messages
    kind: str  # likewise
    args: Args
    state: Mapping[str, Any]  # besides tensors
    names: frozenset[str]  # parameter names
    read: Callable[[str, str], Tensor]  # takes a parameter's name and "" or one of MOMENTS; raises CheckpointError
    has_moments: bool  # whether all are stored whole
    steps: Callable[[str], int | None] = lambda name: None  # Adam's step count for a parameter, if known


def args_in(state: Any, path: str) -> Args:
    """Return the run's flags. Raises CheckpointError."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise CheckpointError(f"{path} does not hold the flags of its run (args): Megatron's trainer did not save it")
    return vars(args)


def counters_of(saved: Saved) -> Counters:
    """Return the run's counters. Raises CheckpointError if one is not a count."""
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


# Flags that change the model, and the values that ours supports; a flag with a field in our config may have any value.
_NONE = """
experimental_attention_variant heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
hybrid_override_pattern linear_attention_type moe_latent_size moe_router_topk_limited_devices scale_normalization
"""
_FALSE = """
apply_residual_connection_post_layernorm attention_output_gate embed_layernorm is_hybrid_model moe_apply_probs_on_input
openai_gelu qk_l2_norm use_mup
"""
_OURS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NONE.split(), (None,)),
    **dict.fromkeys(_FALSE.split(), (False,)),
    "glu_activation": (None, "swiglu"),
    "mlp_type": ("standard",),
    "moe_input_jitter_eps": (None, 0.0),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "moe_token_drop_policy": ("probs",),
    "mtp_num_layers": (None, 0),
    "softmax_type": ("vanilla", "learnable"),
}
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_DEEPSPEED_POSITIONS: dict[Any, str] = {  # members of its enumeration, and their names, as older Pythons save them
    **{1: "rope", 2: "learned_absolute", 3: "alibi"},
    **{"rotary": "rope", "absolute": "learned_absolute", "alibi": "alibi"},
}


def config_of(args: Args, vocab_size: int, names: Collection[str] = ()) -> DecoderConfig:
    """Build the config of these flags. Raises CheckpointError that names unsupported ones. names: of parameters."""
    wrong = [
        f"{name} is {_plain(args[name])!r}"
        for name, values in _OURS.items()
        if name in args and _plain(args[name]) not in values
    ]
    has_experts = _num_experts(args) is not None
    wrong += [
        f"{name} is {_plain(value)!r}, which is not known here"
        for name, value in args.items()
        if not (name in _OURS or name in READ or name.startswith(NEUTRAL) or value in (None, False, 0, ""))
        and (has_experts or not name.startswith("moe_"))
    ]
    positions = _position_embedding(args)
    is_latent = bool(args.get("multi_latent_attention", False))
    if positions not in (("rope",) if is_latent else _POSITIONS):
        wrong.append(f"position_embedding_type is {positions!r}")
    normalization = NORMALIZATIONS.get(str(args.get("normalization", "LayerNorm")).lower())
    if normalization is None:
        wrong.append(f"normalization is {args['normalization']!r}")
    window, factor = args.get("window_size"), args.get("rotary_seq_len_interpolation_factor")
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2 and window[1] in (0, -1)):
        wrong.append(f"window_size is {window!r}")
    if wrong:
        raise CheckpointError(f"our models do not have what these flags of the checkpoint ask for: {'; '.join(wrong)}")
    hidden, heads = size(args, "hidden_size"), size(args, "num_attention_heads")
    swiglu = bool(args.get("swiglu", False)) or args.get("glu_activation") == "swiglu"
    rotary = positions in ("rope", "yarn")
    if "num_key_value_heads" in args:  # Megatron-DeepSpeed's
        groups = args["num_key_value_heads"] or heads
    else:
        groups = (args.get("num_query_groups") or heads) if args.get("group_query_attention", False) else heads
    add_bias_linear = bool(args.get("add_bias_linear", True))
    values = _values(args, FLAGS, DecoderConfig) | {
        "num_layers": size(args, "num_layers"),
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions(args) if positions == "learned_absolute" else None,
        "ffn_hidden_size": args.get("ffn_hidden_size") or default_ffn_size(hidden, swiglu),
        "num_query_groups": groups,
        "kv_channels": args.get("kv_channels") or hidden // heads,
        "normalization": normalization,
        "norm_epsilon": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
        "swiglu": swiglu,
        "exact_gelu": not (swiglu or args.get("quick_geglu", False) or args.get("squared_relu", False))
        and args.get("bias_gelu_fusion", True) is False,
        "add_bias_linear": add_bias_linear,
        "add_qkv_bias": bool(args.get("add_qkv_bias", False)) and not add_bias_linear,
        "window_size": None if window is None or window[0] == -1 else window[0],
        "position_embedding_type": positions,
        "rope_scaling_factor": (
            args.get("rope_scaling_factor", 8.0) if rotary and args.get("use_rope_scaling", False) else None
        ),
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "rotary_seq_len_interpolation_factor": None if factor in (None, 1) else float(factor),
        "moe_layer_freq": _pattern(args.get("moe_layer_freq", 1)),
        **{name: None if args.get(name) is None else str(_pattern(args[name])) for name in _PATTERNS},
    }
    unused = [] if rotary else ["rotary_percent", "rotary_base", "rotary_interleaved"]
    unused += [] if positions == "yarn" else [name for name in FLAGS if name.startswith(("yarn_", "no_yarn_"))]
    unused += [] if has_experts else [name for name in values if name.startswith("moe_")]
    unused += [] if is_latent else _OF_LATENT_ATTENTION
    values = {name: value for name, value in values.items() if name not in unused}
    try:
        config = DecoderConfig(
            **values | (_latent_positions(args) if is_latent else _yarn(args) if positions == "yarn" else {}),
            moe=_experts(args, any(name.endswith("mlp.router.bias") for name in names)),
        )
        config_from_json(dataclasses.asdict(config), DecoderConfig)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's flags describe no model ({error})") from error
    return config


# Patterns of layers: numbers, lists or texts there, texts here.
_PATTERNS = ("no_rope_freq", "window_attn_skip_freq")
_OF_LATENT_ATTENTION = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("mscale", "mscale_all_dim"),
)


def _latent_positions(args: Args) -> dict[str, Any]:
    """Return the rotary positions of latent attention, which have flags of their own."""
    factor = float(args.get("rotary_scaling_factor", 1.0))
    kind = args.get("rope_type") or ("yarn" if factor > 1 else "rope")
    values = {"position_embedding_type": kind, "rotary_percent": 1.0, "rotary_interleaved": False}
    if kind != "yarn":  # the factor of scores follows it all the same
        return values | {"yarn_scaling_factor": None if factor == 1 else factor}
    return values | {
        "yarn_scaling_factor": factor,
        "yarn_original_context": args.get("original_max_position_embeddings", 4096),
        "yarn_beta_fast": float(args.get("beta_fast", 32)),
        "yarn_beta_slow": float(args.get("beta_slow", 1)),
    }


def _yarn(args: Args) -> dict[str, Any]:
    """Return what the trainer's flags of YaRN are called in the checkpoint's."""
    mscale, mscale_all_dim = args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")
    exact = {"no_yarn_correction_range_round_to_int": args.get("yarn_correction_range_round_to_int") is False}
    if mscale is None or mscale_all_dim is None:  # Megatron takes both or none
        return exact
    return exact | {"mscale": float(mscale), "mscale_all_dim": float(mscale_all_dim)}


def _pattern(value: Any) -> int | str:
    return value if type(value) is int else str(value)


def architecture_of(config: DecoderConfig) -> Architecture:
    """Return the architecture with shorter flags; both can describe every model."""
    is_llama = config.normalization == "RMSNorm" and config.swiglu and config.position_embedding_type == "rope"
    return LLAMA if is_llama else GPT


def max_positions(args: Args) -> int:
    return size(args, "max_position_embeddings" if args.get("max_position_embeddings") else "seq_length")


def size(args: Args, name: str, default: int | None = None) -> int:
    """Return a flag that is 1 or more. Raises CheckpointError."""
    value = args.get(name, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"the checkpoint's flag {name} is {value!r}, not a size")
    return value


def _plain(value: Any) -> Any:
    """Return the value of an enumeration's member."""
    return value.args[0] if isinstance(value, StandIn) and value.args else value


def _position_embedding(args: Args) -> Any:
    if args.get("use_rotary_position_embeddings", False):
        return "rope"
    kind = args.get("position_embedding_type", "learned_absolute")
    if isinstance(kind, StandIn):
        kind = _DEEPSPEED_POSITIONS.get(_plain(kind))
    if kind == "learned_absolute" and args.get("add_position_embedding") is False:
        return "none"
    return kind


def _values(args: Args, flags: Mapping[str, str], config_class: type[Any]) -> dict[str, Any]:
    """Return the config fields that ``args`` set. flags: each field's flag."""
    values = {name: args[flag] for name, flag in flags.items() if args.get(flag) is not None}
    switches = {field.name for field in dataclasses.fields(config_class) if isinstance(field.default, bool)}
    return {name: bool(value) if name in switches else value for name, value in values.items()}


def _num_experts(args: Args) -> int | None:
    number = args.get("num_experts")
    if isinstance(number, list):  # Megatron-DeepSpeed's
        number = max(number, default=1)
    return None if number in (None, 0, 1) else number


def _experts(args: Args, router_bias: bool) -> MoEConfig | None:
    number = _num_experts(args)
    if number is None:
        return None
    values = _values(args, EXPERT_FLAGS, MoEConfig)
    values["num_experts"] = number
    values["ffn_hidden_size"] = args.get("moe_ffn_hidden_size") or size(args, "ffn_hidden_size")
    if values.get("load_balancing") in ("global_aux_loss", "none"):  # how it was trained changes no weight
        values["load_balancing"] = "aux_loss"
    values["topk_scaling_factor"] = args.get("moe_router_topk_scaling_factor") or 1.0
    if values.get("score_function") == "sigmoid":  # which scores all experts anyway
        values["router_pre_softmax"] = False
    if args.get("moe_router_enable_expert_bias", False):
        values["bias_update_rate"] = args.get("moe_router_bias_update_rate", 1e-3)
    return MoEConfig(**values, router_bias=router_bias)


# Fields that are written below by other flags than their own.
_COMPUTED = (
    *("vocab_size", "max_position_embeddings", "num_query_groups", "exact_gelu", "add_bias_linear", "window_size"),
    *("rope_scaling_factor", "tie_embeddings", "moe", "moe_layer_freq"),
)


def args_of(config: DecoderConfig, positions: int) -> argparse.Namespace:
    """Return Megatron-LM's flags of a config, as its checkpoints keep them. Raises ValueError if it lacks a feature."""
    if config.moe_first_layer != 1:
        layers = config.layers_with_experts
        frequency = str([int(layer in layers) for layer in range(config.num_layers)])
        config = dataclasses.replace(config, moe_layer_freq=frequency, moe_first_layer=1)
    if config.activation.name == "gelu_tanh" and not config.add_bias_linear:
        raise ValueError("GELU without biases is the exact one in Megatron-LM, and here its tanh approximation")
    if config.rope_scaling_factor is not None and config.yarn_original_context not in (None, 8192):
        raise ValueError(f"--use-rope-scaling is from 8192 tokens in Megatron-LM, not {config.yarn_original_context}")
    # Megatron-LM has the flags that an import knows; a field with another flag must have its default.
    known = {name: flag for name, flag in FLAGS.items() if flag in READ}
    require_fields(config, "Megatron-LM", {}, [*known, *_COMPUTED])
    written = {flag: getattr(config, name) for name, flag in known.items() if not name.startswith("moe_")}
    written["moe_layer_freq"] = str(config.moe_layer_freq)
    for name in (*_PATTERNS, "moe_layer_freq"):
        if written[name] is not None:
            every, layers = read_pattern(name, written[name], config.num_layers)
            written[name] = layers or every
    return argparse.Namespace(
        **written
        | _args_of_experts(config)
        | _args_of_positions(config)
        | {
            "ffn_hidden_size": config.ffn_size,
            "group_query_attention": config.num_groups != config.num_attention_heads,
            "num_query_groups": config.num_groups,
            "kv_channels": config.head_dim,
            "max_position_embeddings": positions,
            "add_position_embedding": config.position_embedding_type == "learned_absolute",
            "use_rope_scaling": config.rope_scaling_factor is not None,
            "rope_scaling_factor": config.rope_scaling_factor or 8.0,
            "window_size": None if config.window_size is None else (config.window_size, 0),
            "bias_gelu_fusion": not config.exact_gelu,
            "add_bias_linear": config.add_bias_linear,
            "add_qkv_bias": config.add_qkv_bias or config.add_bias_linear,
            "untie_embeddings_and_output_weights": not config.tie_embeddings,
            "padded_vocab_size": config.vocab_size,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        }
    )


def _args_of_experts(config: DecoderConfig) -> dict[str, Any]:
    if (moe := config.moe) is None:
        return {"num_experts": None}
    known = {name: flag for name, flag in EXPERT_FLAGS.items() if flag in READ or flag in _OURS}
    # There routers have biases with all other layers.
    require_fields(moe, "Megatron-LM", {"router_bias": (config.add_bias_linear,)}, [*known, "bias_update_rate"])
    written = {flag: getattr(moe, name) for name, flag in known.items()}
    if moe.load_balancing == "all_layers_aux_loss":  # transformers' loss, over one layer there
        written["moe_router_load_balancing_type"] = "aux_loss"
    written["moe_router_enable_expert_bias"] = moe.bias_update_rate is not None
    return written | {"moe_router_bias_update_rate": moe.bias_update_rate or 1e-3}


def _args_of_positions(config: DecoderConfig) -> dict[str, Any]:
    if not config.multi_latent_attention:
        return {
            "yarn_mscale": config.mscale,
            "yarn_mscale_all_dim": config.mscale_all_dim,
            "yarn_correction_range_round_to_int": not config.no_yarn_correction_range_round_to_int,
        }
    return {
        "position_embedding_type": "rope",
        "rope_type": config.position_embedding_type,
        "rotary_scaling_factor": config.yarn_scaling_factor or 1.0,
        "original_max_position_embeddings": config.yarn_original_context or 4096,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
    }
