"""Records of decoders: flags, FLOPs, memory and stages. GPT and Llama differ only in defaults."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_zpp.families.architecture import Architecture
from megatron_zpp.families.decoder_costs import activations, flops_per_token
from megatron_zpp.families.huggingface import HuggingFaceMapping
from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.decoder_config import DecoderConfig, default_ffn_size, read_pattern
from megatron_zpp.models.decoder_flags import DecoderFlags, ExpertFlags
from megatron_zpp.models.moe import MoEConfig
from megatron_zpp.parallel.context import apply_context_parallel
from megatron_zpp.parallel.plans import decoder_plan
from megatron_zpp.parallel.stages import StageModules
from megatron_zpp.settings.checks import SettingsError, flag_of, require, with_flags
from megatron_zpp.settings.flags import flat_values, setting_of
from megatron_zpp.settings.groups import ModelSettings, all_flags

MEGATRON_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}


def _flags_of(group: type[DecoderFlags | ExpertFlags]) -> dict[str, str]:
    """Return {field of the config: its setting}, for fields that hold a flag's value. Flags have Megatron's names."""
    return {field.name: setting_of(field.metadata.get("name", field.name)) for field in dataclasses.fields(group)}


FLAGS = {name: name for name in ("num_layers", "hidden_size", "num_attention_heads")} | _flags_of(DecoderFlags)
EXPERT_FLAGS = {"num_experts": "num_experts", "ffn_hidden_size": "moe_ffn_hidden_size"} | _flags_of(ExpertFlags)


def decoder(
    name: str,
    title: str,
    defaults: Mapping[str, object],
    presets: Mapping[str, Mapping[str, object]],
    huggingface: tuple[HuggingFaceMapping, ...],
) -> Architecture:
    """Build a record. defaults: fields of the config whose default differs from Megatron's in ``DecoderConfig``."""
    defaults = MEGATRON_DEFAULTS | dict(defaults)
    return Architecture(
        name=name,
        title=title,
        config_class=DecoderConfig,
        module=Decoder,
        resolve=partial(resolve, defaults=defaults),
        build_config=build_config,
        flops_per_token=flops_per_token,
        presets=presets,
        tensor_parallel_plan=decoder_plan,
        stages=stages,
        apply_context_parallel=apply_context_parallel,
        activations=activations,
        huggingface=huggingface,
        flags=partial(flags_for, defaults=defaults),
    )


# From flags to a config, and back


def require_shape(model: ModelSettings) -> tuple[int, int, int]:
    """Return number of layers, hidden size and number of heads. Raises SettingsError unless all are given."""
    shape = {name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    missing = [flag_of(name) for name, size in shape.items() if size is None]
    require(not missing, f"how large is the model? give {', '.join(missing)}, or a model with --preset")
    layers, hidden, heads = shape.values()
    return layers, hidden, heads


def resolve(model: ModelSettings, seq_length: int, defaults: Mapping[str, Any]) -> ModelSettings:
    """Complete the flags. Raises SettingsError where they do not fit together."""
    layers, hidden, heads = require_shape(model)
    uneven = f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; or give --kv-channels"
    require(model.kv_channels is not None or hidden % heads == 0, uneven)
    # Megatron's default of --num-query-groups is 1; without --group-query-attention every head has its own group.
    groups = (model.num_query_groups or 1) if model.group_query_attention else heads
    uneven = f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; change one"
    require(heads % groups == 0, uneven)
    length = model.max_position_embeddings or seq_length
    too_long = f"--seq-length {seq_length} is longer than --max-position-embeddings {length}; raise the latter"
    require(seq_length <= length, too_long)
    tie, untie = model.tie_embeddings_and_output_weights, model.untie_embeddings_and_output_weights
    both = "--tie-embeddings-and-output-weights and --untie-embeddings-and-output-weights"
    require(not (tie and untie), f"{both} exclude each other; give one")
    tied = tie or (defaults["tie_embeddings"] and not untie)
    swiglu = model.swiglu or (defaults["swiglu"] and not (model.geglu or model.quick_geglu or model.squared_relu))
    kind = model.position_embedding_type or defaults["position_embedding_type"]
    original_context = model.yarn_original_context
    if model.multi_latent_attention and kind in ("rope", "yarn"):  # Megatron-LM's rules
        stretched = (model.yarn_scaling_factor or 1) > 1
        kind = model.rope_type or ("yarn" if kind == "yarn" or stretched else "rope")
        original_context = original_context or (4096 if kind == "yarn" else None)
    factor = model.rotary_seq_len_interpolation_factor
    dropouts = {name: getattr(model, name) for name in ("attention_dropout", "hidden_dropout")}
    ffn_size = model.ffn_hidden_size or default_ffn_size(hidden, swiglu)
    model = dataclasses.replace(
        model,
        ffn_hidden_size=ffn_size,
        kv_channels=model.kv_channels or hidden // heads,
        num_query_groups=groups,
        max_position_embeddings=length,
        normalization=NORMALIZATIONS[(model.normalization or defaults["normalization"]).lower()],
        swiglu=swiglu,
        disable_bias_linear=model.disable_bias_linear or not defaults["add_bias_linear"],
        position_embedding_type=kind,
        rotary_seq_len_interpolation_factor=factor if factor != 1 else None,
        yarn_original_context=original_context,
        **{name: defaults[name] if given is None else given for name, given in dropouts.items()},
        untie_embeddings_and_output_weights=not tied,
        tie_embeddings_and_output_weights=tied,
    )
    for name in ("add_qkv_bias", "attention_bias", "mlp_bias"):
        nothing = f"{flag_of(name)} adds nothing: all linear layers have biases"
        require(
            model.disable_bias_linear or not getattr(model, name),
            f"{nothing}; give --disable-bias-linear, or leave it out",
        )
    _check_positions(model, model.kv_channels or 0)
    _window(model)
    if model.num_experts is not None:
        shared = model.shared_expert_size
        model = dataclasses.replace(
            model,
            moe_ffn_hidden_size=model.moe_ffn_hidden_size or ffn_size,
            shared_expert_size=shared or (ffn_size if model.residual else None),
            # As in Megatron: sigmoid scores all experts anyway.
            router_pre_softmax=model.router_pre_softmax and model.score_function == "softmax",
        )
        _check_experts(model, model.num_experts or 0, layers)
    try:
        build_config(model, vocab_size=1)
    except ValueError as error:
        words = {name: flag_of(setting) for name, setting in (FLAGS | EXPERT_FLAGS).items()}
        words |= {"add_bias_linear": "biases (--disable-bias-linear)", "window_size": "--window-size"}
        words["group_query_attention"] = "--group-query-attention"
        words["bias_update_rate"] = "--moe-router-enable-expert-bias"
        raise SettingsError(f"these flags describe no model: {with_flags(str(error), words)}") from error
    return model


NORMALIZATIONS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}  # Megatron-DeepSpeed's names and Megatron-LM's
_ROTARY = (
    *("rotary_base", "rotary_percent", "rotary_interleaved"),
    *("use_rope_scaling", "rotary_base_local", "no_rope_freq"),
)
_YARN = (
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("no_yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
)


def _check_positions(model: ModelSettings, head_dim: int) -> None:
    """Raise SettingsError for flags of another kind of positions than the model's."""
    kind, values = model.position_embedding_type, flat_values(model)
    for names, kinds in (_ROTARY, ("rope", "yarn")), (_YARN, ("yarn",)):
        for name in names:
            require(
                kind in kinds
                or (model.multi_latent_attention and kind == "rope")  # Megatron-LM's scripts give them all the same
                or (model.use_rope_scaling and name == "yarn_original_max_position_embeddings")
                or values[name] == all_flags()[name].default,
                f"{flag_of(name)} is of --position-embedding-type {' or '.join(kinds)}, and this model's is {kind}",
            )
    if kind not in ("rope", "yarn"):
        return
    scalings = [name for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor") if getattr(model, name)]
    scalings += ["position_embedding_type"] if kind == "yarn" else []
    both = " and ".join(map(flag_of, scalings)) + (" yarn" if kind == "yarn" else "")
    require(len(scalings) <= 1, f"{both} exclude each other: they scale rotary frequencies differently; give one")
    rotated = model.qk_pos_emb_head_dim if model.multi_latent_attention else int(head_dim * model.rotary_percent)
    even = f"rotary embeddings need an even number of channels per head, got {rotated}"
    require(rotated % 2 == 0 and rotated > 0, f"{even}; change --rotary-percent, or give --kv-channels")
    if kind == "yarn":
        for name in _YARN[:2]:
            require(values[name] is not None, f"--position-embedding-type yarn needs {flag_of(name)}")
        require(model.rotary_base > 1, "--position-embedding-type yarn needs a --rotary-base above 1")
        order = f"--yarn-beta-fast {model.yarn_beta_fast:g} must be at least --yarn-beta-slow {model.yarn_beta_slow:g}"
        require(model.yarn_beta_fast >= model.yarn_beta_slow, order)


_NOT_WITH_SINKHORN = (
    *("moe_aux_loss_coeff", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_topk_scaling_factor", "moe_expert_capacity_factor", "moe_router_num_groups"),
)


def _check_experts(model: ModelSettings, experts: int, layers: int) -> None:
    """Raise SettingsError for experts that do not fit."""
    frequency, first = moe_layer_freq(model), model.moe_first_layer
    for flag, layer in ("--moe-layer-freq", frequency), ("--moe-first-layer", first):
        if isinstance(layer, int):
            require(1 <= layer <= layers, f"{flag} {layer} is 0 or more than --num-layers {layers}; give at most that")
    try:
        listed = [] if isinstance(frequency, int) else read_pattern("--moe-layer-freq", frequency, layers)[1]
    except ValueError as error:
        raise SettingsError(str(error)) from error
    require(not listed or first == 1, "--moe-first-layer and a list of --moe-layer-freq exclude each other; give one")
    require(not listed or any(listed), f"--moe-layer-freq {frequency} has no block with experts; drop --num-experts")
    per_layer, top_k = model.moe_experts_per_layer, model.router_topk
    numbers = [str(experts)] if per_layer is None else per_layer.split(",")
    are_numbers = all(number.isdecimal() and 1 <= int(number) <= experts for number in numbers)
    require(are_numbers, f"--moe-experts-per-layer {per_layer} must be numbers from 1 to {experts}, as 32,32,64")
    few = f"--moe-router-topk {top_k} is more than --num-experts {experts}"
    require(top_k <= min(map(int, numbers)), f"{few}, or one of --moe-experts-per-layer {per_layer}")
    is_sigmoid, balancing = model.score_function == "sigmoid", model.load_balancing
    for name in _NOT_WITH_SINKHORN:
        is_given = flat_values(model)[name] != all_flags()[name].default
        both = f"{flag_of(name)} has no meaning with --moe-router-load-balancing-type sinkhorn; leave one out"
        require(balancing != "sinkhorn" or not is_given, both)
    learns = top_k > 1 or model.router_pre_softmax or is_sigmoid or balancing == "sinkhorn"
    weighs = "--moe-router-topk 1 weighs the only expert by 1, whatever the router says, so that it learns nothing"
    require(learns, f"{weighs}: give --moe-router-pre-softmax too")
    none = "--moe-aux-loss-coeff and --moe-router-load-balancing-type none exclude each other; give one"
    require(not (model.aux_loss_coeff and balancing == "none"), none)


def moe_layer_freq(model: ModelSettings) -> int | str:
    """Return --moe-layer-freq, a number or a list, as the config has it."""
    text = (model.moe_layer_freq or "1").strip(" '\"")
    return int(text) if text.isdecimal() else text


def _window(model: ModelSettings) -> int | None:
    """Return how many earlier tokens a token attends to; None for all. Raises SettingsError."""
    if model.window_size is None:
        return None
    left, _, right = model.window_size.strip("()").replace(" ", "").partition(",")
    form = f"--window-size {model.window_size} must be LEFT,0: a token attends to LEFT tokens before it"
    require(left.isdecimal() and 1 <= int(left) < 2**31 and right == "0", form)
    return int(left)


def build_config(model: ModelSettings, vocab_size: int) -> DecoderConfig:
    """Build the config of flags that ``resolve`` completed."""
    has_learned_positions = model.position_embedding_type == "learned_absolute"
    settings, moe = flat_values(model), None
    values: dict[str, Any] = {name: settings[flag] for name, flag in FLAGS.items()}
    if model.num_experts is not None:
        bias_update_rate = model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None
        experts: dict[str, Any] = {name: settings[flag] for name, flag in EXPERT_FLAGS.items()}
        if experts["load_balancing"] == "none":  # the same as no coefficient
            experts["load_balancing"] = "aux_loss"
        moe = MoEConfig(**experts, bias_update_rate=bias_update_rate)
    return DecoderConfig(
        **values,
        vocab_size=vocab_size,
        max_position_embeddings=model.max_position_embeddings if has_learned_positions else None,
        num_query_groups=model.num_query_groups,
        exact_gelu=model.no_bias_gelu_fusion and not (model.swiglu or model.quick_geglu or model.squared_relu),
        add_bias_linear=not model.disable_bias_linear,
        window_size=_window(model),
        rope_scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
        tie_embeddings=model.tie_embeddings_and_output_weights,
        moe_layer_freq=moe_layer_freq(model) if moe else 1,
        moe=moe,
    )


def flags_for(config: DecoderConfig, positions: int, defaults: Mapping[str, Any]) -> list[str]:
    """Return the trainer's flags for ``config``. positions: the longest sequence."""
    config = dataclasses.replace(  # widths may be left out
        config, ffn_hidden_size=config.ffn_size, num_query_groups=config.num_groups, kv_channels=config.head_dim
    )
    words = ["--max-position-embeddings", str(positions)]
    words += ["--make-vocab-size-divisible-by", str(config.vocab_size)]  # pads any tokenizer's ids to this
    for name, flag in FLAGS.items():
        if name in _ALWAYS_WRITTEN or getattr(config, name) != defaults[name]:
            words += _words(flag, getattr(config, name))
    if config.num_groups != config.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(config.num_groups)]
    switches = {
        "exact_gelu": "--no-bias-gelu-fusion",
        "add_bias_linear": "--disable-bias-linear",
        "tie_embeddings": f"--{'tie' if config.tie_embeddings else 'untie'}-embeddings-and-output-weights",
    }
    words += [flag for name, flag in switches.items() if getattr(config, name) != defaults[name]]
    if config.multi_latent_attention:  # else a scaling factor means yarn
        words += ["--rope-type", config.position_embedding_type]
    if config.rope_scaling_factor is not None:
        words += ["--use-rope-scaling", "--rope-scaling-factor", str(config.rope_scaling_factor)]
    if config.window_size is not None:
        words += ["--window-size", f"{config.window_size},0"]
    if config.moe is not None:
        if config.moe_layer_freq != 1:
            words += ["--moe-layer-freq", str(config.moe_layer_freq)]
        for field in dataclasses.fields(MoEConfig):
            value = getattr(config.moe, field.name)
            if field.name in EXPERT_FLAGS and value != field.default:
                words += _words(EXPERT_FLAGS[field.name], value)
        if (rate := config.moe.bias_update_rate) is not None:
            words += ["--moe-router-enable-expert-bias", *_words("moe_router_bias_update_rate", rate)]
    return words


# Written even at their defaults, so that the flags show a model's shape.
_ALWAYS_WRITTEN = ("norm_epsilon", "attention_dropout", "hidden_dropout", "init_method_std")


def _words(flag: str, value: object) -> list[str]:
    if value is False:  # SwiGLU, where another activation's flag replaces it
        return []
    return [flag_of(flag)] if value is True else [flag_of(flag), str(value)]


def stages(config: DecoderConfig) -> StageModules:
    learned = config.position_embedding_type == "learned_absolute"
    return StageModules(
        first=("word_embeddings", "position_embeddings") if learned else ("word_embeddings",),
        last=("final_norm",) if config.tie_embeddings else ("final_norm", "output_layer"),
        tied="word_embeddings" if config.tie_embeddings else None,
    )
