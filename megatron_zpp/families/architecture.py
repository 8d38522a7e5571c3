"""Architecture: the record of one kind of model, with all that the rest of the program needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_zpp.families.huggingface import HuggingFaceMapping
from megatron_zpp.models.init import initial_std
from megatron_zpp.models.transformer import Transformer, TransformerConfig
from megatron_zpp.parallel.stages import StageModules
from megatron_zpp.settings.checks import require
from megatron_zpp.settings.groups import DistributedSettings, ModelSettings

# Functions of a record take its own config class; what calls them knows a TransformerConfig.
Config = Any


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token that autograd keeps of one block."""

    everything: int
    linear_layers: int  # with --recompute-granularity selective
    input: int  # with --recompute-granularity full
    keys_and_values: int = 0  # the part that context-parallel ranks gather
    scores: int = 0  # for each key that a token may see, where attention is not fused
    # The part of ``everything`` that the recomputation of each module drops (--recompute-modules).
    modules: Mapping[str, int] = field(default_factory=dict)

    def per_tensor_parallel_rank(self, ranks: int, sequence_parallel: bool) -> BlockActivations:
        """Return what one of ``ranks`` keeps; without sequence parallelism, all keep what is between linear layers."""
        if ranks == 1:
            return self
        whole = 0 if sequence_parallel else self.input
        return BlockActivations(
            everything=(self.everything - 4 * whole) // ranks + 4 * whole,
            linear_layers=(self.linear_layers - 3 * whole) // ranks + 3 * whole,
            input=(self.input - whole) // ranks + whole,
            keys_and_values=self.keys_and_values // ranks,
            scores=-(-self.scores // ranks),
            modules={name: kept // ranks for name, kept in self.modules.items()},
        )

    def attending(self, length: int, ranks: int) -> BlockActivations:
        """Add what a token keeps of others, where context-parallel ``ranks`` share a sequence of ``length``."""
        keys = length if ranks == 1 else length * (2 * ranks + 1) // (4 * ranks)  # a rank has 2 of 2 * ranks chunks
        more = (ranks - 1) * self.keys_and_values + keys * self.scores
        modules = {name: kept + more * (name == "core_attn") for name, kept in self.modules.items()}
        return replace(self, everything=self.everything + more, modules=modules)


@dataclass(frozen=True)
class Architecture:
    """One kind of model. Where an optional part is None, the program refuses features that need it."""

    name: str  # in checkpoints and logs
    title: str  # in help and messages
    config_class: type[Config]  # a frozen dataclass: a TransformerConfig
    module: Callable[[Config], Transformer]
    # (flags, --seq-length) -> flags with every default filled in. Raises SettingsError for unsupported ones.
    resolve: Callable[[ModelSettings, int], ModelSettings]
    build_config: Callable[[ModelSettings, int], Config]  # from completed flags and padded vocabulary size
    flops_per_token: Callable[[Config, int], float]  # forward and backward pass, at a --seq-length
    initial_std: Callable[[str, Config], float] = initial_std  # by a weight's name; see ``models.init``
    # Published shapes by name: fields of ModelSettings, and ``seq_length`` of TrainingSettings; flags override them.
    presets: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    tensor_parallel_plan: Callable[[Config, bool], dict[str, ParallelStyle]] | None = None  # bool: sequence-parallel
    stages: Callable[[Config], StageModules] | None = None
    apply_context_parallel: Callable[[Transformer, DeviceMesh], None] | None = None
    activations: Callable[[Config, int], BlockActivations] | None = None  # int: bytes of an element
    # Models of transformers that it is imported from, or exported to: the first that can express a config.
    huggingface: tuple[HuggingFaceMapping, ...] = ()
    flags: Callable[[Config, int], list[str]] | None = None  # the trainer's, of a config and the number of positions

    @property
    def script(self) -> str:
        return f"pretrain_{self.name}.py"

    def build_model(self, settings: ModelSettings, vocab_size: int) -> Transformer:
        """Build the model without storage: call ``to_empty`` and ``init_weights``. vocab_size: the tokenizer's."""
        return self.build_empty(self.build_config(settings, vocabulary_of(settings, vocab_size)))

    def build_empty(self, config: TransformerConfig) -> Transformer:
        """Build the model on the meta device."""
        with torch.device("meta"):
            return self.module(config)

    def num_parameters(self, config: TransformerConfig) -> int:
        """Count the model's parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.build_empty(config).parameters())

    def preset(self, name: str) -> dict[str, Any]:
        """Return the settings of a published model, by field name. Raises SettingsError."""
        names = ", ".join(self.presets) or "none"
        require(name in self.presets, f"--preset {name} does not exist; choose from {names}")
        return dict(self.presets[name])

    def check_parallel(self, distributed: DistributedSettings) -> None:
        """Raise SettingsError for a kind of parallelism that this model has no description for."""
        for flag, size, description in (
            ("--tensor-model-parallel-size", distributed.tensor_model_parallel_size, self.tensor_parallel_plan),
            ("--pipeline-model-parallel-size", distributed.pipeline_model_parallel_size, self.stages),
            ("--context-parallel-size", distributed.context_parallel_size, self.apply_context_parallel),
        ):
            unsupported = f"{flag} {size}: the architecture {self.name} does not support it; leave it out"
            require(size == 1 or description is not None, unsupported)

    def huggingface_model(self, config: Config) -> HuggingFaceMapping:
        """Find the model of transformers that equals ``config``. Raises ValueError with reasons if none does."""
        if not self.huggingface:
            raise ValueError(f"the architecture {self.name} has no mapping to a model of Hugging Face transformers")
        reasons = []
        for mapping in self.huggingface:
            try:
                mapping.to_config(config, 1)
                return mapping
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError(f"transformers has no such model: {'; '.join(reasons)}")


def vocabulary_of(settings: ModelSettings, vocab_size: int) -> int:
    """Return the model's vocabulary for a tokenizer's. Raises ValueError if ``--padded-vocab-size`` is smaller."""
    size = settings.padded_vocab_size or padded_vocab_size(vocab_size, settings.make_vocab_size_divisible_by)
    if size < vocab_size:
        raise ValueError(f"--padded-vocab-size {size} is below the tokenizer's {vocab_size} tokens; give at least that")
    return size


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round ``vocab_size`` up to a multiple: even sizes are faster."""
    return -(-vocab_size // multiple) * multiple
