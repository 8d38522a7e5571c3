"""The shape of a decoder: which of its parts a block has, and how wide they are."""

import ast
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from torch import nn

from megatron_zpp.fields import check_fields

from .decoder_flags import DecoderFlags
from .layers import NORMS, head_size
from .mlp import Activation
from .moe import MoEConfig
from .rotary import yarn_magnitude


@dataclass(frozen=True)
class DecoderConfig(DecoderFlags):
    """The shape of a decoder: fields of flags, and those computed from flags. Defaults are Megatron-LM's, of a GPT."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # padded
    max_position_embeddings: int | None = None  # rows of learned positions; other kinds have none
    _: KW_ONLY
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"  # LayerNorm or RMSNorm
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    num_query_groups: int | None = None  # key/value heads; default one per query head
    exact_gelu: bool = False  # by the error function, as Megatron's is with --no-bias-gelu-fusion; else by tanh
    add_bias_linear: bool = True  # all linear layers have biases, but for the output layer
    window_size: int | None = None  # tokens before it that a token attends to; default all
    rope_scaling_factor: float | None = None  # Llama 3.1's scaling of rope; it uses 8
    tie_embeddings: bool = True
    moe: MoEConfig | None = None  # experts in place of MLPs,
    moe_layer_freq: int | str = 1  # in every k-th block, or a list with 1 for them

    def __post_init__(self) -> None:
        if (self.normalization, self.layernorm_1p) not in NORMS:
            raise ValueError(f"normalization is {self.normalization!r}; choose LayerNorm or RMSNorm")
        check_fields(self, group=DecoderFlags)
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size is {self.window_size}; a token attends to at least 1 before it")
        if self.position_embedding_type == "learned_absolute" and self.max_position_embeddings is None:
            raise ValueError("learned positions need max_position_embeddings")
        if len(self.experts_of_layers) != len(self.layers_with_experts):
            number = len(self.layers_with_experts)
            raise ValueError(f"moe_experts_per_layer needs {number} numbers, one for each block with some")
        if self.moe is not None and self.moe.load_balancing.startswith("all_") and len(set(self.experts_of_layers)) > 1:
            raise ValueError("load_balancing all_layers_aux_loss needs as many experts in every layer")
        for num_experts in self.experts_of_layers:
            assert self.moe is not None
            replace(self.moe, num_experts=num_experts)  # raises ValueError where these do not fit
        if self.position_embedding_type == "yarn" and None in (self.yarn_scaling_factor, self.yarn_original_context):
            raise ValueError("yarn needs yarn_scaling_factor and yarn_original_context")
        if sum((self.swiglu, self.geglu, self.quick_geglu, self.squared_relu)) > 1:
            raise ValueError("swiglu, geglu, quick_geglu and squared_relu exclude each other: choose one")
        if not self.activation.is_gated and (self.activation.offset or self.activation.clamp is not None):
            raise ValueError("glu_linear_offset and activation_func_clamp_value need swiglu, geglu or quick_geglu")
        if self.no_pre_norms and not (self.post_self_attn_layernorm and self.post_mlp_layernorm):
            raise ValueError("no_pre_norms needs post_self_attn_layernorm and post_mlp_layernorm: norms after instead")
        if self.changes_scores and self.attention_dropout:
            raise ValueError("attention_dropout must be 0 with softmax_type learnable or attn_logit_softcapping")
        if self.multi_latent_attention:
            self._check_latent_attention()
        if self.num_layers > 0:  # one block reads every list; there may be a billion, which are refused later
            self.window_of(0), self.has_rope(0)

    def _check_latent_attention(self) -> None:
        if self.num_groups != self.num_attention_heads:
            raise ValueError("multi_latent_attention has no query groups: leave group_query_attention out")
        others = ["add_bias_linear", "add_qkv_bias", "attention_bias", "qk_layernorm_whole", "rotary_interleaved"]
        others += ["window_size", "attn_logit_softcapping"]
        if wrong := [name for name in others if getattr(self, name)] or (["softmax_type"] if self.has_sinks else []):
            raise ValueError(f"multi_latent_attention does not work with {', '.join(wrong)}; leave them out")
        if self.rotary_percent != 1:
            raise ValueError("multi_latent_attention rotates all of qk_pos_emb_head_dim: leave rotary_percent out")
        if self.v_head_dim > self.qk_head_dim + self.qk_pos_emb_head_dim:
            raise ValueError(f"v_head_dim {self.v_head_dim} must be at most qk_head_dim + qk_pos_emb_head_dim")
        if self.position_embedding_type not in ("rope", "yarn") or self.no_rope_freq:
            raise ValueError("multi_latent_attention needs position_embedding_type rope or yarn in every block")

    def make_norm(self, width: int, epsilon: float | None = None) -> nn.Module:
        """Make a norm of vectors of ``width`` channels. epsilon: default ``norm_epsilon``."""
        return NORMS[self.normalization, self.layernorm_1p](width, eps=epsilon or self.norm_epsilon)

    @property
    def num_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return head_size(self.hidden_size, self.num_attention_heads, self.num_groups, self.kv_channels)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def has_sinks(self) -> bool:
        return self.softmax_type == "learnable"

    @property
    def changes_scores(self) -> bool:
        """Whether attention is more than the softmax of scores, so that kernels do not have it."""
        return self.has_sinks or self.attn_logit_softcapping is not None

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores; None is 1 / sqrt of the queries' width."""
        # As in Megatron, whatever scales the frequencies.
        if self.softmax_scale is None and self.multi_latent_attention and self.yarn_scaling_factor is not None:
            magnitude = yarn_magnitude(self.yarn_scaling_factor, self.mscale_all_dim)
            return magnitude**2 / (self.qk_head_dim + self.qk_pos_emb_head_dim) ** 0.5
        return self.softmax_scale

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens before it a token attends to in the block with number ``layer``; None for all."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return self.window_size
        every, kinds = read_pattern("window_attn_skip_freq", self.window_attn_skip_freq, self.num_layers)
        has_window = kinds[layer] if kinds else (layer + 1) % every != 0
        return self.window_size if has_window else None

    def has_rope(self, layer: int) -> bool:
        """Return whether the block with number ``layer`` has the model's positions, should these be rotary."""
        if self.no_rope_freq is None:
            return True
        every, kinds = read_pattern("no_rope_freq", self.no_rope_freq, self.num_layers)
        return not kinds[layer] if kinds else (layer + 1) % every != 0

    def is_local(self, layer: int) -> bool:
        """Return whether the block with number ``layer`` rotates with ``rotary_base_local``."""
        return self.rotary_base_local is not None and self.window_of(layer) is not None

    @property
    def activation(self) -> Activation:
        gelu = "gelu" if self.exact_gelu else "gelu_tanh"
        if self.squared_relu:
            return Activation("squared_relu", False, self.glu_linear_offset, self.activation_func_clamp_value)
        name = "silu" if self.swiglu else "quick_gelu" if self.quick_geglu else gelu
        is_gated = self.swiglu or self.geglu or self.quick_geglu
        return Activation(name, is_gated, self.glu_linear_offset, self.activation_func_clamp_value)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size, self.swiglu)

    @property
    def layers_with_experts(self) -> Sequence[int]:
        if isinstance(self.moe_layer_freq, str):
            _, kinds = read_pattern("moe_layer_freq", self.moe_layer_freq, self.num_layers)
            return [layer for layer, has_experts in enumerate(kinds) if has_experts and self.moe is not None]
        return range(self.moe_first_layer - 1, self.num_layers if self.moe is not None else 0, self.moe_layer_freq)

    @property
    def experts_of_layers(self) -> list[int]:
        """The number of experts in each of ``layers_with_experts``."""
        if self.moe is None:
            return []
        if self.moe_experts_per_layer is None:
            return [self.moe.num_experts] * len(self.layers_with_experts)
        return [int(number) for number in self.moe_experts_per_layer.split(",")]


def default_ffn_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's width of the MLP: 4 times the hidden size; of SwiGLU 8/3 of it, rounded down to a multiple of 64."""
    return (int(hidden_size * 8 / 3 / 64) * 64 or 64) if swiglu else 4 * hidden_size


def read_pattern(name: str, text: str, num_layers: int) -> tuple[int, list[int]]:
    """Read a pattern of blocks as Megatron writes it: "4" -> 4, []; "([0]*3+[1])*2" -> 0, [0, 0, 0, 1, 0, 0, 0, 1].

    Raises ValueError for anything else, and for a list that has not one 0 or 1 per block.
    """

    def read(node: ast.expr) -> list[int] | int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [value for element in node.elts if isinstance(value := read(element), int)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = read(node.left), read(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= num_layers:
                return left * right
        raise ValueError(text)

    try:
        found = read(ast.parse(text.strip(" '\""), mode="eval").body)  # scripts quote lists within quotes
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        found = []
    if isinstance(found, int) and found > 0:
        return found, []
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= {0, 1}:
        raise ValueError(f"{name} is {text!r}; give k for every k-th block, or 0 or 1 for each of {num_layers} blocks")
    return 0, found
