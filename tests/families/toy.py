"""An architecture from outside the package: attention and MLP beside each other, as in GPT-NeoX, with ReLU.

Its forward pass returns an auxiliary loss, the mean square of the last hidden states.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.families import Architecture, BlockActivations, HuggingFaceMapping, Weight
from megatron_zpp.families.decoder_only import require_shape
from megatron_zpp.families.huggingface import require_sizes, require_values, same, same_weight_and_bias
from megatron_zpp.models.attention import SelfAttention, document_attention
from megatron_zpp.models.decoder_config import DecoderConfig
from megatron_zpp.models.layers import output_logits
from megatron_zpp.models.rotary import frequencies, rotary_table
from megatron_zpp.models.transformer import ModelOutput, Transformer
from megatron_zpp.settings.checks import require
from megatron_zpp.settings.groups import ModelSettings

COEFFICIENT = 0.1  # weight of the auxiliary loss


@dataclass(frozen=True)
class ToyConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    init_method_std: float = 0.02

    @property
    def attention(self) -> DecoderConfig:
        sizes = self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size
        return DecoderConfig(*sizes, position_embedding_type="rope", attention_dropout=0.0)

    @property
    def ffn_size(self) -> int:
        return 2 * self.hidden_size


class ToyBlock(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention = SelfAttention(config.attention, layer=0)
        self.linear_fc1, self.linear_fc2 = nn.Linear(hidden, config.ffn_size), nn.Linear(config.ffn_size, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        mlp = self.linear_fc2(F.relu(self.linear_fc1(self.norm2(x))))
        return x + self.self_attention(self.norm1(x), cos, sin, documents) + mlp


class Toy(Transformer):
    config: ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ToyBlock(config) for _ in range(config.num_layers))
        self.last_norm = nn.LayerNorm(config.hidden_size)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.document_attention = document_attention

    def forward(self, tokens: Tensor, labels: Any = None, position_ids: Any = None, cu_seqlens: Any = None) -> Any:
        x = self.word_embeddings(tokens)
        frequency = frequencies(self.config.attention.head_dim, 10000, tokens.device)
        cos, sin = rotary_table(frequency, tokens.shape[1], position_ids)
        documents = self.document_attention(cu_seqlens, tokens, x.dtype, False)
        for layer in self.layers:
            x = layer(x, cos.to(x.dtype), sin.to(x.dtype), documents)
        x = self.last_norm(x)
        if labels is None:
            return output_logits(x, self.output_layer.weight)
        losses = self.loss(x, self.output_layer.weight, labels, None)
        return ModelOutput(losses, {"square loss": COEFFICIENT * x.float().square().mean()})


def resolve(model: ModelSettings, seq_length: int) -> ModelSettings:
    _, hidden, heads = require_shape(model)
    require(hidden % (2 * heads) == 0, "--hidden-size needs an even number a head")
    return dataclasses.replace(model, max_position_embeddings=model.max_position_embeddings or seq_length)


def build_config(model: ModelSettings, vocab_size: int) -> ToyConfig:
    return ToyConfig(*require_shape(model), vocab_size, model.init_method_std)


def flops_per_token(config: ToyConfig, seq_length: int) -> float:
    block = 8 * config.hidden_size**2  # attention 4, MLP 2 * 2
    weights = config.num_layers * block + config.hidden_size * config.vocab_size
    return float(6 * weights + 6 * config.num_layers * config.hidden_size * seq_length)


def activations(config: ToyConfig, itemsize: int) -> BlockActivations:
    hidden = itemsize * config.hidden_size
    return BlockActivations(everything=11 * hidden, linear_layers=8 * hidden, input=hidden)


# As GPT-NeoX of transformers, whose layouts are ours.


def to_hf_config(config: ToyConfig, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads, "intermediate_size": config.ffn_size, "hidden_act": "relu",
        "max_position_embeddings": positions, "initializer_range": config.init_method_std, "layer_norm_eps": 1e-5,
        "use_parallel_residual": True, "rotary_pct": 1.0, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"},
    }  # fmt: skip


def from_hf_config(hf: Mapping[str, Any]) -> tuple[ToyConfig, int]:
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    require_sizes(hf, *sizes)
    require_values(hf, {"hidden_act": ("relu",), "use_parallel_residual": (True,)})
    return ToyConfig(*(hf[key] for key in sizes), init_method_std=hf["initializer_range"]), hf[
        "max_position_embeddings"
    ]


def weights(config: ToyConfig) -> Iterator[Weight]:
    yield same("word_embeddings.weight", "gpt_neox.embed_in.weight")
    for layer in range(config.num_layers):
        for ours, theirs in {
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "self_attention.linear_qkv": "attention.query_key_value",
            "self_attention.linear_proj": "attention.dense",
            "linear_fc1": "mlp.dense_h_to_4h",
            "linear_fc2": "mlp.dense_4h_to_h",
        }.items():
            yield from same_weight_and_bias(f"layers.{layer}.{ours}", f"gpt_neox.layers.{layer}.{theirs}")
    yield from same_weight_and_bias("last_norm", "gpt_neox.final_layer_norm")
    yield same("output_layer.weight", "lm_head.weight")


def flags(config: ToyConfig, positions: int) -> list[str]:
    return (
        f"--num-layers {config.num_layers} --hidden-size {config.hidden_size} --num-attention-heads "
        f"{config.num_attention_heads} --max-position-embeddings {positions} --init-method-std "
        f"{config.init_method_std} --make-vocab-size-divisible-by {config.vocab_size}"
    ).split()


TOY = Architecture(
    "toy", "toy", ToyConfig, Toy, resolve, build_config, flops_per_token,
    initial_std=lambda name, config: 2 * config.init_method_std if "output_layer" in name else config.init_method_std,
    presets={"toy-1": dict(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)},
    activations=activations,
    huggingface=(HuggingFaceMapping("gpt_neox", to_hf_config, from_hf_config, weights),),
    flags=flags,
)  # fmt: skip
BARE = dataclasses.replace(TOY, activations=None, huggingface=())  # without its optional parts
