"""Which program a run was: what wandb and TensorBoard keep beside its settings."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_program() -> dict[str, str]:
    """The command, the commit of the checkout if it is one, and versions of what computes."""
    described = {
        "command": shlex.join(sys.argv),
        "commit": _commit(Path(__file__).parent),
        "python_version": platform.python_version(),
    }
    for package in ("megatron_zpp", "torch"):
        with suppress(PackageNotFoundError):  # of a checkout that is not installed
            described[f"{package}_version"] = version(package)
    return {name: value for name, value in described.items() if value}


def _commit(folder: Path) -> str:
    """As git describes it, with -dirty behind it where files were changed; "" where git knows of none."""
    git = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
