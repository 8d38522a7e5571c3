"""Run a command of the package in this process."""

from __future__ import annotations

import contextlib
import io
from types import ModuleType
from unittest.mock import patch


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
    assert (code, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1, err
    return err
