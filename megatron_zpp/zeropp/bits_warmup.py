"""More bits while a run begins: --zero-gradient-bits-warmup and --zero-weight-difference-bits-warmup."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class BitsWarmup:
    """``bits`` during the first ``steps`` optimizer steps of a run."""

    steps: int
    bits: int

    @classmethod
    def parse(cls, text: str) -> BitsWarmup:
        """Read "STEPS:BITS". Raises ValueError for anything else."""
        match = re.fullmatch(r"([1-9]\d*):(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"must be STEPS:BITS, such as 500:4, got {text!r}")
        return cls(int(match[1]), int(match[2]))
