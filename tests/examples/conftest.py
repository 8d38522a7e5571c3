"""Programs that a cluster alone has, stood in for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import environment


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a program for bash into a folder; return a PATH with the folder in front."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, text: str) -> str:
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
        return f"{folder}{os.pathsep}{environment()['PATH']}"

    return write
