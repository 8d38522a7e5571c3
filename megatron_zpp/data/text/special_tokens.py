"""Special tokens of tokenizers, and where the files of a Hugging Face tokenizer name them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.files import read_json_object

ADDED_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # what an AddedToken is made of


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special ids. None: it has no such token."""

    eod: int  # ends a document
    bos: int | None = None
    pad: int | None = None
    prefix: tuple[int, ...] = ()  # put in front of each text
    suffix: tuple[int, ...] = ()  # put behind it
    ids: frozenset[int] = frozenset()  # all that stand for no text
    sources: Mapping[str, str] = field(default_factory=dict)  # "eod", "bos", "pad": the file that names it
    conflict: str | None = None  # two files that name other ends of a text


def check_description(description: Mapping[str, Any]) -> None:
    """Raise ValueError unless a description of a tokenizer that was read has every part, of its type."""
    kinds: dict[str, Any] = {
        "type": str,
        "vocab_size": int,
        "eod": int,
        "bos": int | None,
        "pad": int | None,
        "prefix": list,
    }
    kinds |= {"suffix": list, "sources": dict, "sample_sha256": str | None}
    wrong = [name for name, kind in kinds.items() if not isinstance(description.get(name, ...), kind)]
    if wrong:
        raise ValueError(f"the description of its tokenizer lacks {', '.join(wrong)}")


def named_tokens(folder: Path) -> tuple[dict[str, str], dict[str, str], str | None]:
    """Read which tokens transformers takes as "bos", "eod" and "pad", the file of each, and a conflict over the end."""
    config, older = (_read(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    named: dict[str, str] = {}
    sources: dict[str, str] = {}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": older}
    ends = {}
    for file, content in files.items():
        for name, key in (("bos", "bos_token"), ("eod", "eos_token"), ("pad", "pad_token")):
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str):
                continue
            if name == "eod":
                ends[file] = token
            if content is config or "added_tokens_decoder" not in config or name not in named:
                named[name], sources[name] = token, file
    conflict = None
    if len(set(ends.values())) > 1:
        conflict = " and ".join(f"{folder / file} ends texts with {token}" for file, token in ends.items())
    return named, sources, conflict


def added_tokens(folder: Path, named: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that the files beside a tokenizer.json add to it, in the order of their ids."""
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        yield {name: token[name] for name in ADDED_TOKEN if name in token}
    added = [] if decoder else sorted(_read(folder / "added_tokens.json").items(), key=lambda item: item[1])
    for content in [*(content for content, _ in added), *named.values()]:
        is_special = content in named.values()
        yield {"content": content, "special": is_special, "normalized": not is_special}


def end_tokens(folder: Path) -> tuple[list[int], str]:
    """Return the ids at which generation ends, by generation_config.json or else config.json, and the file."""
    for name in ("generation_config.json", "config.json"):
        ends = _read(folder / name).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if all(type(end) is int for end in ends) and ends:
            return ends, name
    return [], ""


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}
