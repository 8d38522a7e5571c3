"""Run programs: commands of the package in this process, others in their own; and damage files."""

import contextlib
import io
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import fsspec
import pytest

from tests.conftest import ROOT, environment


def run(
    *command: object,
    status: int | None = 0,
    folder: Path = ROOT,
    timeout: float | None = 280,
    env: Mapping[str, str] | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program that must end with ``status`` (None: with any), in ``env`` or ``environment(**more)``."""
    words = [*map(str, command)]
    env = environment(**more) if env is None else env
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
    assert status in (None, done.returncode), f"{shlex.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def cut(path: Path, size: int | None = None) -> None:
    """Leave a file's first ``size`` bytes (below 0: all but its last ones), or its first half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 if size is None else size])


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)


def call(tool: ModuleType, *argv: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command's ``main``."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with patch("sys.argv", [tool.__name__, *map(str, argv)]):
            code = tool.main()
    return code, out.getvalue(), err.getvalue()


def call_well(tool: ModuleType, *argv: object) -> str:
    """Return the stdout of a command that must succeed in silence."""
    code, out, err = call(tool, *argv)
    assert (code, err) == (0, "")
    return out


def call_wrongly(tool: ModuleType, *argv: object) -> str:
    """Return the error of a command that must fail with one line."""
    code, out, err = call(tool, *argv)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, refused: str) -> None:
    """Have fsspec's store of this process open no object with ``name`` in its path in the mode ``refused``."""
    memory = fsspec.get_filesystem_class("memory")
    open_object = memory._open

    def fail(self, path, mode="rb", **more):
        if mode == refused and name in path:
            raise RuntimeError("the token has expired")
        return open_object(self, path, mode, **more)

    monkeypatch.setattr(memory, "_open", fail)
