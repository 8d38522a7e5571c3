"""What transformers' generate() goes by: kept from the model that the tokenizer came with, or made of its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.files import read_bounded


def generation_settings(settings: Mapping[str, Any], tokens: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The special tokens of config.json, and generation_config.json.

    An imported model's tokenizer lies in the folder that it was imported from, and what generate() read there is kept,
    lists of end tokens too. settings: the checkpoint's. tokens: ids of our tokenizer, which count where there is no
    such folder; the end of documents is always one of the end tokens. Raises ValueError for files that are damaged.
    """
    path = settings.get("tokenizer_model") or settings.get("vocab_file")
    if not tokens or path is None:
        return dict(tokens), dict(tokens)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config, generation = (_read(folder / name) for name in ("config.json", "generation_config.json"))
    if not generation:
        return dict(tokens), dict(tokens)
    end = {"eos_token_id": _ends(generation.get("eos_token_id", config.get("eos_token_id")), tokens["eos_token_id"])}
    kept = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    return tokens | kept | end, tokens | generation | end


def _ends(theirs: int | list[int] | None, ours: int) -> int | list[int]:
    every = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    if ours not in every:
        every = [ours, *every]
    return every if isinstance(theirs, list) or len(every) > 1 else ours


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bounded(path))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return content
