"""All settings of a run: name, type, default, meaning and command-line flag.

Each dataclass is one group of flags in ``--help``. Names and defaults are Megatron-LM's wherever it has the setting.
Bounds refuse what no run survives: products of larger sizes overflow 64 bits, smaller epsilons are 0 in fp32.
"""

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from megatron_zpp.files import is_url
from megatron_zpp.islands.config import IslandConfig
from megatron_zpp.settings.flags import Flag, flat_values, iterate_flags
from megatron_zpp.settings.job import (
    CheckpointSettings,
    DataSettings,
    DistributedSettings,
    LoggingSettings,
    ZeroSettings,
)
from megatron_zpp.settings.model import ActivationSettings, ModelSettings, PrecisionSettings
from megatron_zpp.settings.tokenizer import TokenizerSettings
from megatron_zpp.settings.training import LoraSettings, OptimizerSettings, ScheduleSettings, TrainingSettings
from megatron_zpp.zeropp.config import ZeroPPConfig


@dataclass(frozen=True)
class Settings:
    """All groups of one run."""

    architecture: str  # its name; ``families.find_architecture`` has its record
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    precision: PrecisionSettings = PrecisionSettings()
    activation: ActivationSettings = ActivationSettings()
    zero: ZeroSettings = ZeroSettings()
    zeropp: ZeroPPConfig = ZeroPPConfig()
    island: IslandConfig = IslandConfig()
    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    distributed: DistributedSettings = DistributedSettings()

    @property
    def run_folder(self) -> str | None:
        """The local folder of a run's other files: --save, or the folder of its metrics if that is a URL."""
        save, logging = self.checkpoint.save, self.logging
        return (logging.metrics_dir or logging.tensorboard_dir) if is_url(save) else save

    def as_flat_dict(self) -> dict[str, Any]:
        """Return every setting by its name, for logs, wandb's config and checkpoints' metadata."""
        flat: dict[str, Any] = {"architecture": self.architecture}
        for attribute, _ in iterate_groups():
            flat |= flat_values(getattr(self, attribute))
        return flat


def iterate_groups() -> Iterator[tuple[str, type[Any]]]:
    """Yield each group's attribute of Settings and its dataclass, in order."""
    for attribute, group in typing.get_type_hints(Settings).items():
        if isinstance(group, type) and is_dataclass(group):
            yield attribute, group


@functools.cache
def all_flags() -> dict[str, Flag]:
    """Return {setting: flag} of all groups."""
    return {flag.setting: flag for _, group in iterate_groups() for flag in iterate_flags(group)}


@functools.cache
def flags_by_name() -> dict[str, Flag]:
    """Return {name or alias: flag} of all groups."""
    return {name: flag for flag in all_flags().values() for name in (flag.name, *flag.aliases)}
