"""One record per model. A model is added by its file here, or elsewhere, and one line in ``ARCHITECTURES``."""

import importlib

from .architecture import Architecture as Architecture
from .architecture import BlockActivations as BlockActivations
from .architecture import padded_vocab_size as padded_vocab_size
from .architecture import vocabulary_of as vocabulary_of
from .gpt import GPT as GPT
from .huggingface import HuggingFaceMapping as HuggingFaceMapping
from .huggingface import Weight as Weight
from .llama import LLAMA as LLAMA

ARCHITECTURES: tuple[Architecture, ...] = (GPT, LLAMA)


def find_architecture(name: str) -> Architecture:
    """Return one of ``ARCHITECTURES`` by name. Raises ValueError."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    raise ValueError(f"there is no architecture {name}; choose from {', '.join(each.name for each in ARCHITECTURES)}")


def load_architecture(text: str) -> Architecture:
    """Return the value of ``--architecture``: one of ours by name, or ``package.module:NAME``, which is imported.

    Never call it with text from a file: importing runs code. Raises ValueError.
    """
    module_name, colon, name = text.partition(":")
    if not colon:
        return find_architecture(text)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--architecture {text} cannot be imported ({error}): is its folder in PYTHONPATH?") from error
    if not isinstance(found, Architecture):
        raise ValueError(f"--architecture {text} is no Architecture but {type(found).__name__}")
    return found
