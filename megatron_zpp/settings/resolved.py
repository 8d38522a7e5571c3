"""Settings as ``parse_settings`` returns them: checked, completed, and with a value for all that every run needs.

These classes are for readers and type checkers alone: ``parse_settings`` returns a ``Settings``.
"""

from megatron_zpp.settings.groups import ModelSettings, Settings, TokenizerSettings, TrainingSettings


class ResolvedModel(ModelSettings):
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    attention_dropout: float
    hidden_dropout: float


class ResolvedTraining(TrainingSettings):
    micro_batch_size: int
    global_batch_size: int
    seq_length: int


class ResolvedTokenizer(TokenizerSettings):
    tokenizer_type: str


class ResolvedSettings(Settings):
    model: ResolvedModel
    training: ResolvedTraining
    tokenizer: ResolvedTokenizer
