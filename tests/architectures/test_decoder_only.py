"""What checkpoints keep of a decoder's shape, those of earlier versions too."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_zpp.architectures import find_architecture
from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.model import saved_model
from megatron_zpp.models.decoder import DecoderConfig

# model_config of meta.json as GPTConfig and LlamaConfig were written, before one class took their place.
EARLIER = {
    "gpt": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
        "ffn_hidden_size": 256, "kv_channels": 16, "norm_epsilon": 1e-05, "attention_dropout": 0.1,
        "hidden_dropout": 0.1, "init_method_std": 0.02, "tie_embeddings": True,
    },
    "llama": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "ffn_hidden_size": 128,
        "num_query_groups": 2, "kv_channels": 16, "norm_epsilon": 1e-05, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "rotary_base": 500000, "rope_scaling_factor": 8.0, "init_method_std": 0.02,
        "tie_embeddings": False,
    },
}  # fmt: skip
EXPECTED = {
    "gpt": DecoderConfig(4, 64, 4, 512, 64, ffn_hidden_size=256, num_query_groups=4, kv_channels=16),
    "llama": DecoderConfig(
        *(4, 64, 4, 512),
        ffn_hidden_size=128,
        num_query_groups=2,
        kv_channels=16,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=500000,
        rope_scaling_factor=8.0,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tie_embeddings=False,
    ),
}


def meta(name: str, config: dict) -> dict:
    return {"settings": {"architecture": name}, "model_config": config}


@pytest.mark.parametrize("name", EARLIER)
def test_shapes_of_earlier_versions_are_what_they_were(name):
    assert saved_model(meta(name, EARLIER[name])) == (find_architecture(name), EXPECTED[name])
    now = dataclasses.asdict(EXPECTED[name])
    assert saved_model(meta(name, now))[1] == EXPECTED[name]


@pytest.mark.parametrize("change", [{"normalization": "none"}, {"window_size": 0}, {"swiglu": 1}, {"experts": 4}])
def test_shapes_that_are_none_are_refused(change):
    with pytest.raises(CheckpointError, match=f"not one of llama .*{next(iter(change))}"):
        saved_model(meta("llama", EARLIER["llama"] | change))
