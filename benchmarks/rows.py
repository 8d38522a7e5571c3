"""Results as JSON lines: a row for each measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Keep a row at once: a measurement that takes hours may be cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def has_row(path: Path, key: Mapping[str, Any]) -> bool:
    """Whether a row with all these values is there already."""
    return any(key.items() <= row.items() for row in read_rows(path))
