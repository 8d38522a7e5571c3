"""GPT and Llama as wholes: shapes, causality, loss, names, and an independent implementation of a block."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.models.gpt import GPTConfig
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.llama import LlamaConfig
from megatron_zpp.models.transformer import Transformer
from tests.architectures.find import architecture_of

GPT_CONFIG = GPTConfig(2, 48, 4, vocab_size=130, max_position_embeddings=24, attention_dropout=0.0, hidden_dropout=0.0)
LLAMA_CONFIG = LlamaConfig(2, 48, 4, vocab_size=130, num_query_groups=2, ffn_hidden_size=96)
CONFIGS = pytest.mark.parametrize("config", [GPT_CONFIG, LLAMA_CONFIG], ids=["gpt", "llama"])


def build(config: GPTConfig | LlamaConfig, seed: int = 1) -> Transformer:
    model = architecture_of(config).build_empty(config).to_empty(device="cpu")
    init_weights(model, seed)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 130, (3, 25), generator=generator)
    return text[:, :-1], text[:, 1:]


@CONFIGS
def test_loss_is_the_cross_entropy_of_the_logits(config):
    model = build(config)
    tokens, labels = batch()
    logits = model(tokens)
    loss = model(tokens, labels)
    assert logits.shape == (3, 24, 130) and loss.shape == (3, 24) and loss.dtype == torch.float32
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 24)
    torch.testing.assert_close(loss, expected)

    weights = torch.rand(3, 24)
    gradients = torch.autograd.grad((loss * weights).sum(), model.parameters())
    expected_gradients = torch.autograd.grad((expected * weights).sum(), model.parameters())
    for ours, plain in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@CONFIGS
def test_a_token_is_seen_by_itself_and_later_ones_only(config):
    model = build(config)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 130
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))  # [S]
    assert (difference[:10] < 1e-6).all() and (difference[10:] > 1e-5).all()


@CONFIGS
def test_positions_matter(config):
    # Without positions the last token's logits would not change when two earlier tokens are exchanged.
    model = build(config)
    tokens, _ = batch()
    exchanged = tokens.clone()
    exchanged[:, [3, 9]] = tokens[:, [9, 3]]
    assert (model(tokens)[:, -1] - model(exchanged)[:, -1]).abs().max() > 1e-5


@CONFIGS
def test_dropout_falls_on_the_embeddings_and_on_both_sublayers_of_every_block(config):
    share = 0.25
    model = build(dataclasses.replace(config, hidden_dropout=share)).double()
    inputs, outputs = {}, {}  # of modules, by name

    def keep(name):
        def hook(module, args, output):
            inputs[name], outputs[name] = args[0], output

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))

    def dropped():
        """By place: what came out of dropout, and what went in."""
        embeddings = outputs["word_embeddings"]
        if "position_embeddings" in outputs:
            embeddings = embeddings + outputs["position_embeddings"]
        places = {"embeddings": (inputs["layers.0"], embeddings)}
        for block in ("layers.0", "layers.1"):
            middle = inputs[f"{block}.pre_mlp_norm"]
            places[f"{block} attention"] = (middle - inputs[block], outputs[f"{block}.self_attention"])
            places[f"{block} mlp"] = (outputs[block] - middle, outputs[f"{block}.mlp"])
        return places

    torch.manual_seed(0)
    model(batch()[0])
    for place, (after, before) in dropped().items():
        ratio = after / before  # [B, S, H]
        kept = ratio > 1e-6
        assert kept.double().mean() == pytest.approx(1 - share, abs=0.03), place
        torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / (1 - share)), rtol=1e-4, atol=0)
    model.eval()(batch()[0])
    for after, before in dropped().values():
        torch.testing.assert_close(after, before)


def test_gpt_block_equals_torchs_transformer_layer():
    model = build(GPT_CONFIG)
    block = model.layers[0]
    for parameter in block.parameters():  # large values, so that a forgotten bias or norm shows
        torch.nn.init.normal_(parameter, std=0.3)
    layer = torch.nn.TransformerEncoderLayer(
        48, 4, 192, dropout=0.0, activation=lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
    )
    attention = block.self_attention
    # Ours is head by head [q, k, v]; torch's is all q, all k, all v.
    regrouped = {
        kind: getattr(attention.linear_qkv, kind).detach().unflatten(0, (4, 3, 12)).transpose(0, 1).flatten(0, 2)
        for kind in ("weight", "bias")
    }
    layer.self_attn.in_proj_weight.data, layer.self_attn.in_proj_bias.data = regrouped["weight"], regrouped["bias"]
    layer.self_attn.out_proj, layer.linear1, layer.linear2 = (
        attention.linear_proj,
        block.mlp.linear_fc1,
        block.mlp.linear_fc2,
    )
    layer.norm1, layer.norm2 = block.input_norm, block.pre_mlp_norm
    x = torch.randn(2, 9, 48)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(block(x), layer(x, src_mask=mask, is_causal=True), rtol=1e-4, atol=1e-4)


def test_llama_mlp_and_norm_equal_the_formulas():
    model = build(LLAMA_CONFIG)
    block = model.layers[0]
    x = torch.randn(2, 5, 48)
    gate, up = block.mlp.linear_fc1_gate.weight, block.mlp.linear_fc1_up.weight
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ block.mlp.linear_fc2.weight.T
    torch.testing.assert_close(block.mlp(x), expected)
    torch.nn.init.normal_(block.input_norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.input_norm.weight
    torch.testing.assert_close(block.input_norm(x), expected)


def test_parameter_names_are_megatrons():
    common = ["input_norm", "self_attention.linear_proj", "self_attention.linear_qkv"]
    common += ["mlp.linear_fc2", "pre_mlp_norm"]
    names = {name for name, _ in build(GPT_CONFIG).named_parameters()}
    layer_names = {f"layers.{i}.{name}.{kind}" for i in range(2)
                   for name in [*common, "mlp.linear_fc1"] for kind in ("weight", "bias")}  # fmt: skip
    root_names = {"word_embeddings.weight", "position_embeddings.weight", "final_norm.weight", "final_norm.bias"}
    assert names == layer_names | root_names  # the tied output layer is no parameter of its own
    names = {name for name, _ in build(LLAMA_CONFIG).named_parameters()}
    common += ["mlp.linear_fc1_gate", "mlp.linear_fc1_up"]  # Megatron's linear_fc1
    layer_names = {f"layers.{i}.{name}.weight" for i in range(2) for name in common}
    assert names == layer_names | {"word_embeddings.weight", "final_norm.weight", "output_layer.weight"}


def test_llama_defaults_follow_megatron():
    config = LlamaConfig(2, 4096, 32, 128)
    assert (config.ffn_size, config.num_groups, config.head_dim) == (10880, 32, 128)  # int(8 * 4096 / 3 / 64) * 64


def test_gpt_refuses_more_tokens_than_positions():
    with pytest.raises(ValueError, match=r"25 tokens.*max_position_embeddings is 24"):
        build(GPT_CONFIG)(torch.zeros(1, 25, dtype=torch.int64))
