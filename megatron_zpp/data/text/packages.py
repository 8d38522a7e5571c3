"""Imports packages that only some data needs."""

import importlib
import logging
from typing import Any


def load_package(name: str, user: str, extra: str) -> Any:
    """Import a package for ``user``, without the warnings that it logs meanwhile.

    Raises ImportError that names the ``extra`` of megatron_zpp with it.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # such as torchao's about extensions that it has for another Python
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{user} needs the package {name}: pip install {name}, or megatron_zpp's extra {extra}"
        raise ImportError(message) from error
    finally:
        logging.disable(before)
