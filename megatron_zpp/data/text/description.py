"""Describe how a tokenizer treats texts: datasets and checkpoints keep the description, and programs print it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_zpp.data.text.tokenizers import NullTokenizer, Tokenizer

# On these, two tokenizers are compared.
SAMPLE_TEXTS = (
    "def f(x):\n    return {'a': 1.50, \"b\": x ** 2}  # 10 %\n\n\tif not x:\r\n",
    "  Two blanks before, three   inside, one behind ",
    "Straße, où? Ελλάδα, Москва, 東京, नमस्ते 👩‍🔬 1234567890 ﬁ ① Å",
)


def describe_tokenizer(tokenizer_type: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe how a tokenizer treats texts, for JSON: what datasets and checkpoints keep of it."""
    special = tokenizer.special
    ids = None  # NullTokenizer reads no text
    if not isinstance(tokenizer, NullTokenizer):
        ids = [[int(i) for i in tokenizer.tokenize(text, add_special_tokens=False)] for text in SAMPLE_TEXTS]
    return {
        **{"type": tokenizer_type, "vocab_size": tokenizer.vocab_size},
        **{"eod": special.eod, "bos": special.bos, "pad": special.pad},
        **{"prefix": list(special.prefix), "suffix": list(special.suffix), "sources": dict(special.sources)},
        "sample_sha256": ids and hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
    }


def format_description(description: Mapping[str, Any]) -> str:
    """Format a description as one line: ``HuggingFaceTokenizer, 512 ids, BOS 509 (FILE) in front of texts, ...``."""
    sources, prefix, suffix = description["sources"], description["prefix"], description["suffix"]
    parts = [f"{description['type']}, {description['vocab_size']:,} ids"]
    for name, shown in (("bos", "BOS"), ("eod", "end of document"), ("pad", "PAD")):
        token = description[name]
        source = f" ({sources[name]})" if name in sources else ""
        parts.append(f"no {shown}" if token is None else f"{shown} {token}{source}")
    parts.append(f"texts begin with {' '.join(map(str, prefix))}" if prefix else "nothing in front of texts")
    return ", ".join([*parts, f"texts end with {' '.join(map(str, suffix))}"] if suffix else parts)


def differences(made_with: Mapping[str, Any], used: Mapping[str, Any]) -> list[str]:
    """List what makes two described tokenizers treat texts differently; nothing where one reads ids alone."""
    names = {"eod": "the end of a document is", "prefix": "texts begin with", "suffix": "texts end with"}
    if made_with["sample_sha256"] is None or used["sample_sha256"] is None:
        return []
    differing = []
    for name, words in names.items():
        there, here = ("nothing" if each[name] in (None, []) else each[name] for each in (made_with, used))
        differing += [f"{words} {there}, here {here}"] if there != here else []
    return differing + (["texts become other ids"] if made_with["sample_sha256"] != used["sample_sha256"] else [])


def check_same_tokenizer(
    name: str, made_with: Mapping[str, Any] | None, used: Mapping[str, Any], remedy: str = "Give that one"
) -> None:
    """Raise ValueError if ``name`` was made with a tokenizer that treats texts otherwise; None: nobody knows."""
    if made_with is not None and (differing := differences(made_with, used)):
        other = f"{name} was made with another tokenizer, {format_description(made_with)}: {'; '.join(differing)}"
        raise ValueError(f"{other}. {remedy}")


def refuse_conflict(tokenizer: Tokenizer) -> None:
    """Raise ValueError if two files beside the tokenizer name other ends of a text."""
    if tokenizer.special.conflict is not None:
        raise ValueError(f"{tokenizer.special.conflict}: make both name the token that ends your texts")
