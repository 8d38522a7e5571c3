"""Each record's counts of parameters and operations, and the presets that they describe."""

import dataclasses
import resource

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import ARCHITECTURES, GPT
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import active_parameters
from tests.families.find import architecture_of
from tests.models.test_models import CONFIGS, batch, build

flops_per_token = GPT.flops_per_token  # Llama's is the same


def preset_config(name: str) -> DecoderConfig:
    architecture = next(each for each in ARCHITECTURES if name in each.presets)
    run = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"
    settings = parse_settings(architecture, f"--preset {name} {run}".split())
    (size,) = {vocabulary for prefix, vocabulary in VOCABULARIES.items() if name.startswith(prefix)} or {32000}
    return architecture.build_config(settings.model, size)


VOCABULARIES = {  # by the beginnings of names
    **{"gpt-1": 50304, "gpt-3": 50304, "gpt-oss": 201088, "qwen3": 151936, "qwen2.5": 152064, "smollm3": 128256},
    **dict.fromkeys(("llama-8b", "llama-70b", "llama-405b", "llama-1b", "llama-3b"), 128256),
    **{"deepseek-v2": 102400, "deepseek-v3": 129280, "gemma3": 262144, "glm": 151552, "olmo2": 100352},
    **{"olmo3": 100352, "olmoe": 50304, "gemma2": 256000, "kimi": 163840, "moonlight": 163840, "minimax": 200064},
    **{"qwen1.5": 151936, "phi-3": 32064, "phi-4": 100352, "nemotron": 256000, "granite": 49159},
}


def test_flops_per_token_are_those_counted_by_hand():
    # Llama-3-8B at 8192: per layer h·(dq + 2·dkv) + dq·h + 3·h·ffn, and h·V; 6 each, and 6·L·dq·s of causal attention.
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert flops_per_token(preset_config("llama-8b"), 8192) == 6 * (32 * layer + 4096 * 128256) + 6 * 32 * 4096 * 8192
    layer = 4 * 768 * 768 + 2 * 768 * 3072
    assert flops_per_token(preset_config("gpt-125m"), 1024) == 6 * (12 * layer + 768 * 50304) + 6 * 12 * 768 * 1024


def test_flops_of_a_window_count_what_is_within():
    config, length = preset_config("mistral-7b"), 8192
    of_scores = flops_per_token(config, length) - flops_per_token(config, 0)
    within = sum(min(token + 1, 4096) for token in range(length)) / length  # on average, the diagonal whole
    assert of_scores / (32 * 12 * 4096) == pytest.approx(within, abs=0.5)
    everything = dataclasses.replace(config, window_size=None)
    assert flops_per_token(config, 4096) == flops_per_token(everything, 4096)


@CONFIGS
def test_flops_equal_the_counted_matrix_products(config):
    model = build(config)
    tokens, _ = batch()
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(flops for operator, flops in counts.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert linear == tokens.numel() * flops_per_token(config, seq_length=0)


SIZES = {  # in billions of parameters
    "gpt-125m": 0.125, "gpt-350m": 0.356, "gpt-1.3b": 1.32, "gpt-13b": 12.85, "gpt-18b": 18.4, "llama-0.8b": 0.78,
    "llama-7b": 6.738, "llama-13b": 13.016, "llama-8b": 8.030,  # as published with the weights
    "mistral-7b": 7.242, "qwen3-0.6b": 0.596, "qwen3-8b": 8.191, "qwen3-30b-a3b": 30.53, "mixtral-8x7b": 46.70,
    "llama-1b": 1.236, "llama-3b": 3.213, "llama-70b": 70.554, "llama-405b": 405.85, "qwen3-14b": 14.77,
    "qwen3-32b": 32.76, "qwen3-235b-a22b": 235.09, "qwen2.5-7b": 7.616, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "deepseek-v2-lite": 15.71, "deepseek-v3": 671.03, "gemma3-1b": 1.000, "gemma3-12b": 11.77, "gemma3-27b": 27.01,
    "glm-4.5-air": 106.85, "olmo2-7b": 7.299, "olmo2-32b": 32.23, "smollm3-3b": 3.075,
    "deepseek-v2": 235.74, "kimi-k2": 1026.4, "moonlight-16b-a3b": 15.96, "gemma2-2b": 2.614, "gemma2-9b": 9.242,
    "gemma2-27b": 27.227, "glm-4.5": 352.8,  # without multi-token prediction's layer
    "minimax-m2": 228.7, "qwen1.5-moe-a2.7b": 14.32, "phi-3-mini": 3.821, "phi-4": 14.66, "nemotron-4-15b": 15.6,
    "nemotron-4-340b": 341.0, "granite-3.3-8b": 8.171, "olmoe-1b-7b": 6.919, "olmo3-7b": 7.298, "olmo3-32b": 32.23,
}  # fmt: skip


MET_BY_A_TOKEN = {  # as published, in billions
    "qwen3-30b-a3b": 3.3, "mixtral-8x7b": 12.9, "qwen3-235b-a22b": 22, "deepseek-v2": 21, "deepseek-v3": 37,
    "kimi-k2": 32, "qwen1.5-moe-a2.7b": 2.7, "olmoe-1b-7b": 1.3,
    "gpt-oss-20b": 3.61 + 0.58, "gpt-oss-120b": 5.13 + 0.58,  # these without embeddings or output layer
    "moonlight-16b-a3b": 2.24 + 0.67, "glm-4.5": 32 + 1.55, "glm-4.5-air": 12 + 1.24, "minimax-m2": 10 + 1.23,
}  # fmt: skip


def test_every_preset_has_its_published_size():
    """And as many parameters that a token meets, where experts divide them."""
    assert SIZES.keys() == {name for each in ARCHITECTURES for name in each.presets}
    for name, size in SIZES.items():
        config = preset_config(name)
        model = architecture_of(config).build_empty(config)
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(size, rel=0.005), name
        if name in MET_BY_A_TOKEN:
            assert active_parameters(model) / 1e9 == pytest.approx(MET_BY_A_TOKEN[name], rel=0.03), name


def test_18b_on_meta_allocates_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = GPT.build_empty(preset_config("gpt-18b"))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(parameter.is_meta for parameter in model.parameters()) and not list(model.buffers())
    assert after - before < 50 * 1024  # KiB; the model is 70 GiB
