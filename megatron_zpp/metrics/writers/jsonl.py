"""metrics.jsonl, which reports and comparisons read (metrics/history.py)."""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_zpp.files import PATIENCE_SECONDS, lock_for_process, open_regular
from megatron_zpp.metrics.history import METRICS, SCHEMA
from megatron_zpp.metrics.writers.base import RunStart


class JsonlWriter:
    """Appends one JSON object a line: the start, then each point. Raises ValueError if another process writes there."""

    def __init__(self, start: RunStart) -> None:
        assert start.folder is not None
        start.folder.mkdir(parents=True, exist_ok=True)
        self._file = open_regular(path := start.folder / METRICS, "a+b")
        begun = {"schema": SCHEMA, "iteration": start.iteration, "settings": start.settings, "program": start.program}
        try:
            lock_for_process(self._file, start.folder, "run write metrics", PATIENCE_SECONDS)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a kill cut the last line off
                    self._file.write(b"\n")
            self._append(begun)
        except BlockingIOError:
            raise ValueError(f"another run writes {path}: give --metrics-dir another folder, or end that run") from None
        except OSError:
            with suppress(OSError):
                self._file.close()  # or this start would be written when the process ends, behind a later one's points
            raise

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Append a point; NaN and Inf, which JSON lacks, are null."""
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._append({"iteration": iteration, "samples": consumed_samples, **values})

    def _append(self, record: Mapping[str, Any]) -> None:
        # The buffer keeps what a full disk did not take, so no later line is cut off.
        self._file.write(f"{json.dumps({**record, 'time': time.time()}, default=float)}\n".encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
