"""The record of a model that a test builds."""

from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.models.transformer import TransformerConfig


def architecture_of(config: TransformerConfig) -> Architecture:
    return next(each for each in ARCHITECTURES if isinstance(config, each.config_class))
