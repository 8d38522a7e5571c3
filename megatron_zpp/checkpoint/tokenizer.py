"""A checkpoint keeps the tokenizer's files: no program follows a path out of it, which a stranger may have set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.data.text.tokenizers import huggingface_path
from megatron_zpp.files import regular_file

from .files import CheckpointError, sync_file
from .meta import open_in

# Beside a tokenizer: what transformers reads of it, and the tokens that end a text.
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("config.json", "generation_config.json"),
)
_PATHS = ("tokenizer_model", "vocab_file", "merge_file")
_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken", "vocab.json", "merges.txt", *_BESIDE)
_LARGEST = 256 * 2**20  # bytes of one file


def copy_tokenizer(settings: Mapping[str, Any], checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Copy the files of a run's tokenizer into its checkpoint; returns what meta.json says of them.

    Those that are gone meanwhile are left out: a save must not fail for them.
    """
    entries = {}
    for name, source in _files(settings).items():
        try:
            if regular_file(source).stat().st_size > _LARGEST:
                continue
            content = Path(source).read_bytes()
        except (OSError, ValueError):
            continue
        with open(checkpoint / name, "xb") as file:
            file.write(content)
            sync_file(file)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return entries


def settings_with_tokenizer(checkpoint: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's settings, whose tokenizer is the one that it keeps, if any; see ``build_tokenizer``.

    Raises CheckpointError where files of such names are links, or not among those that are sealed.
    """
    for name in _NAMES:
        if os.path.lexists(checkpoint / name):
            if name not in meta["files"]:
                raise CheckpointError(f"{checkpoint / name} is no file of the checkpoint: remove it")
            open_in(checkpoint, name).close()
    kept = {name: str(checkpoint / name) for name in _NAMES if name in meta["files"]}
    model = kept.get("tokenizer.model") or kept.get("tokenizer.tiktoken") or kept.get("tokenizer.json")
    files = {"tokenizer_model": model, "vocab_file": kept.get("vocab.json"), "merge_file": kept.get("merges.txt")}
    return {**meta["settings"], **files}


def _files(settings: Mapping[str, Any]) -> dict[str, Path]:
    """Files that the tokenizer reads, by the names under which a checkpoint keeps them."""
    kind, model, vocab_file, merge_file = (settings.get(name) for name in ("tokenizer_type", *_PATHS))
    if kind == "GPT2BPETokenizer" and vocab_file and merge_file:
        return {"vocab.json": Path(vocab_file), "merges.txt": Path(merge_file)}
    if not model:
        return {}
    if kind in ("HuggingFaceTokenizer", "HFTokenizer"):
        try:
            path = huggingface_path(model)
        except (OSError, ValueError):
            return {}
        model = path / "tokenizer.json" if path.is_dir() else path
        names = {"tokenizer.json": model}
    elif kind == "TikTokenizer":
        names = {"tokenizer.json" if str(model).endswith(".json") else "tokenizer.tiktoken": Path(model)}
    else:
        names = {"tokenizer.model": Path(model)}
    beside = {name: Path(model).parent / name for name in _BESIDE}
    return names | {name: path for name, path in beside.items() if path.is_file()}
