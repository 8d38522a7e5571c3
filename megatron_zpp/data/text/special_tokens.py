"""Special tokens of tokenizers, and where the files of a Hugging Face tokenizer name them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.files import read_json_object

# End-of-document tokens of published tokenizer.json files without a tokenizer_config.json.
KNOWN_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[EOS]", "<|eot_id|>")
ADDED_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # the fields of an AddedToken


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
    wrong += ["vocab_size"] if not wrong and description["vocab_size"] < 1 else []
    if wrong:
        raise ValueError(f"the description of its tokenizer lacks {', '.join(wrong)}")


Files = Mapping[str, dict[str, Any]]  # {name: content} of the files that ``read_beside`` reads


def read_beside(folder: Path) -> Files:
    """Read the JSON files beside a tokenizer; {} for one that is missing. Raises ValueError."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    files = [folder / name for name in (*names, "generation_config.json", "config.json")]
    return {file.name: read_json_object(file) if file.is_file() else {} for file in files}


def named_tokens(files: Files) -> tuple[dict[str, str], dict[str, str], str | None]:
    """Return which tokens transformers takes as "bos", "eod" and "pad", the file of each, and two ends in conflict."""
    config = files["tokenizer_config.json"]
    named: dict[str, str] = {}
    sources: dict[str, str] = {}
    ends = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = files[file]
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
        conflict = " and ".join(f"{file} ends texts with {token}" for file, token in ends.items())
    return named, sources, conflict


def added_tokens(files: Files, named: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that the files beside a tokenizer.json add to it, in the order of their ids."""
    decoder = files["tokenizer_config.json"].get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        yield {name: token[name] for name in ADDED_TOKEN if name in token}
    added = [] if decoder else sorted(files["added_tokens.json"].items(), key=lambda item: item[1])
    for content in [*(content for content, _ in added), *named.values()]:
        is_special = content in named.values()
        yield {"content": content, "special": is_special, "normalized": not is_special}


def find_eod(
    files: Files, named: Mapping[str, str], sources: dict[str, str], ids: Mapping[str, int], special_ids: frozenset[int]
) -> tuple[int | None, str | None]:
    """Return the id that ends a document, and a conflict over it. sources: gets the place that says so.

    ids: of all tokens. The named token; or else a special one at which generation ends; or one that is known by name.
    """
    ends, source = _ends_of_generation(files)
    if (eod := ids.get(named.get("eod", ""))) is not None:
        this = f"{sources['eod']} ends texts with {eod} ({named['eod']})"
        return eod, f"{this}, and {source} with {', '.join(map(str, ends))}" if ends and eod not in ends else None
    by_name = [name for name in KNOWN_EOD_TOKENS if name in ids]
    if known := [end for end in ends if end in special_ids]:  # an id of another tokenizer may be a letter here
        sources["eod"] = source
        return known[0], None
    sources["eod"] = f"no file names it; taken by its name, {by_name[0]}" if by_name else ""
    return ids[by_name[0]] if by_name else None, None


def _ends_of_generation(files: Files) -> tuple[list[int], str]:
    """Return the ids at which generation ends, and the file that says so."""
    for name in ("generation_config.json", "config.json"):
        ends = files[name].get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if all(type(end) is int for end in ends) and ends:
            return ends, name
    return [], ""
