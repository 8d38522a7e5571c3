"""Imports packages that only some data needs."""

import importlib
from typing import Any


def load_package(name: str, user: str, extra: str) -> Any:
    """Import a package for ``user``. Raises ImportError that names the ``extra`` of megatron_zpp with it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{user} needs the package {name}: pip install {name}, or megatron_zpp's extra {extra}"
        raise ImportError(message) from error
