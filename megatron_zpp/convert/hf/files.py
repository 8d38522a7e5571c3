"""A model's folder as transformers lays it out: config.json, and safetensors files with an index if they are several.

Tensors are read one at a time, and written a file at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.files import read_bounded

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def require_packages() -> None:
    """Raises ImportError with what to install, if something of the extra ``hf`` is missing.

    Keeps transformers' notes to itself: what matters about a configuration is checked here.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"the package {error.name} is not installed: pip install transformers, or megatron_zpp's extra hf"
        ) from error
    transformers.logging.set_verbosity_error()


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` when all went well and is removed else.

    Raises ValueError where ``path`` is in use. flag: what the user gave it by.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{flag} {path} exists already: give a new folder, or remove that one")
    partial = path.with_name(path.name + ".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            path.rmdir()
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class WeightFiles:
    """The safetensors files of a folder. Raises ValueError for what is not there, or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).exists():
            self._file_of = _read_index(folder / INDEX)
        elif (folder / SINGLE).exists():
            self._file_of = {}
        else:
            pickled = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
            if pickled:
                raise ValueError(
                    f"{folder} has its weights pickled ({pickled[0]}), and unpickling runs what is in the file. If you "
                    "trust it, load it with transformers and save it with save_pretrained: that writes safetensors"
                )
            raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, str] = {}  # as safetensors names them: F32, BF16
        for path in sorted({folder / name for name in self._file_of.values()} or {folder / SINGLE}):
            for name, (shape, dtype) in _header(path).items():
                if self._file_of.setdefault(name, path.name) == path.name:
                    self.shapes[name], self.dtypes[name] = torch.Size(shape), dtype
        missing = sorted(self._file_of.keys() - self.shapes.keys())
        if missing:
            raise ValueError(f"{folder / self._file_of[missing[0]]} lacks {missing[0]}, which {INDEX} has there")

    def read(self, name: str) -> Tensor:
        """One tensor, in the dtype that it is stored in."""
        from safetensors import safe_open

        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name).clone()  # or it would keep the whole file mapped


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of = json.loads(read_bounded(path))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in file_of.values()):
            raise ValueError("weight_map should name files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    missing = sorted({file for file in file_of.values() if not (path.parent / file).is_file()})
    if missing:
        raise ValueError(f"{path.parent} is not complete: {', '.join(missing)} of {path.name} missing")
    return file_of


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    """{name: (shape, dtype)} of the tensors of one file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # a pipe would wait for its other end
        raise ValueError(f"{path} is no regular file")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (slice_.get_shape(), slice_.get_dtype()) for name, slice_ in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def write_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    max_file_size: str,
) -> list[str]:
    """Write every tensor of ``shapes``; returns the names of the files. ``read`` gives the values, one tensor a call.

    max_file_size: of one file, such as "2GB"; that much is in memory at a time.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    empty: dict[str, Tensor] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_file_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = {name: read(name).to(dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX, index)
    return list(plan.filename_to_tensors)


def read_config(folder: Path, model_types: Sequence[str]) -> dict[str, Any]:
    """config.json with the defaults of its keys filled in, if it is of one of ``model_types``. Raises ValueError."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model of transformers: it has no config.json")
    written = read_object(path)
    if written.get("model_type") not in model_types:  # others may not even be known to transformers
        return written
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # of many kinds: transformers checks values with a library of its own
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from error


def write_config(
    folder: Path, config: dict[str, Any], tokens: dict[str, Any], generation: dict[str, Any], dtype: str
) -> None:
    """config.json, and what generate() reads. tokens: ids of special tokens; {} where there is no tokenizer."""
    # Without a tokenizer no id is special; the defaults are those of published models.
    tokens_or_none = {"bos_token_id": None, "eos_token_id": None} | tokens
    write_json(folder / "config.json", config | tokens_or_none | {"torch_dtype": dtype})
    write_json(folder / "generation_config.json", generation)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    config, generation = (read_object(folder / name) for name in ("config.json", "generation_config.json"))
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bounded(path))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return content
