"""What all units of a model share, real or emulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import ZeroPPConfig
from .micro_batch import MicroBatch
from .monitor import ErrorMonitor
from .traffic import Traffic


@dataclass(frozen=True)
class Shared:
    """The settings, and what all collectives of a model count and go by."""

    config: ZeroPPConfig
    traffic: Traffic = field(default_factory=Traffic)
    monitor: ErrorMonitor = field(default_factory=ErrorMonitor)
    micro_batch: MicroBatch = field(default_factory=MicroBatch)
