"""Settings as ``parse_settings`` completes them, for readers and type checkers: what it returns is a ``Settings``."""

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
