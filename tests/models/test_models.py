"""Decoders as wholes: where dropout falls, how far a window reaches, and which configs cannot be built."""

import dataclasses

import pytest
import torch

from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.transformer import Transformer
from tests.families.find import architecture_of
from tests.models.configs import gpt_config, llama_config

GPT_CONFIG = gpt_config(2, 48, 4, vocab_size=130, max_position_embeddings=24, attention_dropout=0.0, hidden_dropout=0.0)
LLAMA_CONFIG = llama_config(2, 48, 4, vocab_size=130, num_query_groups=2, ffn_hidden_size=96)
# Between the two: what neither has.
MIXED_CONFIG = gpt_config(
    *(2, 48, 4, 130),
    num_query_groups=2,
    ffn_hidden_size=64,
    normalization="RMSNorm",
    layernorm_1p=True,
    qk_layernorm=True,
    swiglu=True,
    position_embedding_type="yarn",
    rotary_percent=0.5,
    yarn_scaling_factor=4.0,
    yarn_original_context=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
CONFIGS = pytest.mark.parametrize("config", [GPT_CONFIG, LLAMA_CONFIG, MIXED_CONFIG], ids=["gpt", "llama", "mixed"])


def build(config: DecoderConfig, seed: int = 1) -> Transformer:
    model = architecture_of(config).build_empty(config).to_empty(device="cpu")
    init_weights(model, seed)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 130, (3, 25), generator=generator)
    return text[:, :-1], text[:, 1:]


@CONFIGS
def test_dropout_falls_on_the_embeddings_and_on_both_sublayers_of_every_block(config):
    share = 0.25
    model = build(dataclasses.replace(config, hidden_dropout=share)).double()
    inputs, outputs = {}, {}  # by the modules' names

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


def test_without_positions_earlier_tokens_may_be_exchanged():
    model = build(dataclasses.replace(LLAMA_CONFIG, position_embedding_type="none", num_layers=1))
    tokens, _ = batch()
    exchanged = tokens.clone()
    exchanged[:, [3, 9]] = tokens[:, [9, 3]]
    torch.testing.assert_close(model(tokens)[:, -1], model(exchanged)[:, -1])


def test_a_window_is_within_a_document_and_reaches_so_far_in_each_layer():
    model = build(dataclasses.replace(LLAMA_CONFIG, window_size=4))
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 130
    for cu_seqlens, end in (None, 10 + 2 * 4), (torch.tensor([0, 13, 24, 48, 72], dtype=torch.int32), 12):
        before, after = model(tokens, cu_seqlens=cu_seqlens)[0], model(changed, cu_seqlens=cu_seqlens)[0]
        differing = (before - after).abs().amax(dim=1) > 1e-6
        assert differing.nonzero().flatten().tolist() == [*range(10, end + 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(normalization="BatchNorm"), "normalization is 'BatchNorm'; choose"),
        (dict(position_embedding_type="alibi"), "position_embedding_type must be one of"),
        (dict(position_embedding_type="learned_absolute"), "learned positions need max_position_embeddings"),
        (dict(position_embedding_type="yarn"), "yarn needs yarn_scaling_factor"),
        (dict(window_size=0), "window_size is 0"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA_CONFIG, **change)
