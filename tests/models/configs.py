"""Configs as the two programs make them, of a shape and what else a test wants."""

from typing import Any

from megatron_zpp.families.llama import DEFAULTS
from megatron_zpp.models.decoder import DecoderConfig

gpt_config = DecoderConfig  # whose defaults are GPT's


def llama_config(*shape: int, **more: Any) -> DecoderConfig:
    return DecoderConfig(*shape, **{**DEFAULTS, **more})
