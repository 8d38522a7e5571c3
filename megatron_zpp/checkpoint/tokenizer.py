"""Keep the tokenizer's files in the checkpoint, so that no program follows a path that a stranger may have set."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.data.text.description import format_description
from megatron_zpp.data.text.tokenizers import huggingface_path
from megatron_zpp.files import is_bucket, lexists, regular_file

from .files import CheckpointError, digest, read_regular, write_durably
from .meta import open_in

# Files that transformers reads beside a tokenizer.
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("config.json", "generation_config.json"),
)
_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken", "vocab.json", "merges.txt", *_BESIDE)
_MAX_BYTES = 256 * 2**20  # per file


def copy_tokenizer(settings: Mapping[str, Any], checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Copy the files of a run's tokenizer into its checkpoint; return their entries in meta.json.

    Leaves out files that are missing now: a save must not fail because of them.
    """
    entries = {}
    for name, source in _files(settings).items():
        try:
            if regular_file(source).stat().st_size > _MAX_BYTES:
                continue
            content = source.read_bytes()
        except (OSError, ValueError):
            continue
        copy = checkpoint / name
        if not (copy.is_file() and read_regular(copy) == content):  # a reader of published weights may be reading it
            write_durably(copy, content)
        entries[name] = {"bytes": len(content), "sha256": digest(content)}
    return entries


def check_tokenizer(settings: Mapping[str, Any], saved_files: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file that makes tokens is not the one kept; what either lacks is not compared."""
    for name, source in _files(settings).items():
        is_compared = name in saved_files and name not in ("config.json", "generation_config.json")
        if is_compared and source.is_file() and digest(source.read_bytes()) != saved_files[name]["sha256"]:
            other = f"{source} is not the file of the checkpoint's tokenizer, which keeps it as {name}"
            raise CheckpointError(f"{other}. Give the same, or --override-data")


def check_same_ids(described: Mapping[str, Any], checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Compare the ids that the run's tokenizer, ``described``, makes of texts; return a note if they are not known.

    So fine-tuning may use another kind of the same tokenizer, add tokens, and name another end of text. Raises
    CheckpointError if ids differ.
    """
    saved = meta.get("tokenizer")
    if saved is None:
        return [f"the tokenizer is not compared, because {checkpoint} does not describe its own"]
    if any(saved[name] != described[name] for name in ("prefix", "suffix", "sample_sha256")):
        raise CheckpointError(
            f"this is not the tokenizer of {checkpoint}, {format_description(saved)}: texts become other ids. "
            "Give the same, or with --finetune --override-data"
        )
    return []


def settings_with_tokenizer(checkpoint: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's settings with the paths of the tokenizer's files in it. Raises CheckpointError."""
    folder = checkpoint
    if is_bucket(checkpoint):  # tokenizers read files of this machine
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in _NAMES:
        if lexists(checkpoint / name):
            if name not in meta["files"]:
                raise CheckpointError(f"{checkpoint / name} is not a file of the checkpoint: remove it")
            with open_in(checkpoint, name) as file:
                if folder != checkpoint:
                    (folder / name).write_bytes(file.read())
    kept = {name: str(folder / name) for name in _NAMES if name in meta["files"]}
    model = kept.get("tokenizer.model") or kept.get("tokenizer.tiktoken") or kept.get("tokenizer.json")
    files = {"tokenizer_model": model, "vocab_file": kept.get("vocab.json"), "merge_file": kept.get("merges.txt")}
    return {**meta["settings"], **files}


def _files(settings: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that the tokenizer reads, by their names in a checkpoint."""
    kind, model = settings.get("tokenizer_type"), settings.get("tokenizer_model")
    vocab_file, merge_file = settings.get("vocab_file"), settings.get("merge_file")
    if kind == "GPT2BPETokenizer" and vocab_file and merge_file:
        return {"vocab.json": Path(vocab_file), "merges.txt": Path(merge_file)}
    if not model:
        return {}
    path, name = Path(model), "tokenizer.model"
    if kind in ("HuggingFaceTokenizer", "HFTokenizer"):
        try:
            path = huggingface_path(model)
        except (OSError, ValueError):
            return {}
        path, name = path / "tokenizer.json" if path.is_dir() else path, "tokenizer.json"
    elif kind == "TikTokenizer":
        name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.tiktoken"
    beside = {name: path.parent / name for name in _BESIDE}
    return {name: path} | {name: path for name, path in beside.items() if path.is_file()}
