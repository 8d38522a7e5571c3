"""Read and write a model's folder as transformers does, one tensor and one file at a time."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.meta import config_from_json
from megatron_zpp.convert.hf import mxfp4
from megatron_zpp.data.text.packages import load_package
from megatron_zpp.errors import attempt
from megatron_zpp.families import Architecture, HuggingFaceMapping
from megatron_zpp.files import read_json_object
from megatron_zpp.models.transformer import TransformerConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAME_AS = {"kimi_k2": "deepseek_v3"}  # models whose code, beside their weights, is another's under a new name


def require_packages() -> None:
    """Raise ImportError with what to install if transformers is missing. Silences its notes."""
    load_package("transformers", "this program", "hf").logging.set_verbosity_error()
    load_package("transformers.modeling_utils", "this program", "hf")  # now, as it imports torchao with warnings


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """Yield a folder that becomes ``path`` on success. flag: the option for ``path``. Raises ValueError if in use."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{flag} {path} exists already: give a new folder, or remove that one")
    partial = path.with_name(path.name + ".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with attempt("write", path):
            yield partial
        for file in partial.rglob("*"):
            if file.is_file():  # safetensors makes files that only their owner reads
                file.chmod(partial.stat().st_mode & 0o666)
        if path.exists():
            path.rmdir()
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class WeightFiles:
    """The safetensors files of a folder, MXFP4 as one tensor in bf16. Raises ValueError if missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).exists():
            self._file_of = _read_index(folder / INDEX)
        elif (folder / SINGLE).exists():
            self._file_of = {}
        else:
            pickled = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
            if pickled:
                unsafe = f"{folder} has its weights pickled ({pickled[0]}), and unpickling runs what is in the file"
                raise ValueError(f"{unsafe}: if you trust it, save it with transformers' save_pretrained")
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
        self._packed: dict[str, tuple[str, str]] = {}
        for blocks in [name for name in self.shapes if name.endswith("_blocks") and self.dtypes[name] == "U8"]:
            size, name = self.shapes[blocks], blocks.removesuffix("_blocks")
            scales = f"{name}_scales"
            if len(size) == 4 and size[-1] == 16 and self.shapes.get(scales) == size[:-1]:
                self._packed[name] = blocks, scales
                self.shapes[name], self.dtypes[name] = torch.Size((size[0], 32 * size[2], size[1])), "BF16"
                del self.shapes[blocks], self.shapes[scales]

    def read(self, name: str) -> Tensor:
        """Read one tensor in its stored dtype."""
        from safetensors import safe_open

        if name in self._packed:
            return mxfp4.decode(*map(self.read, self._packed[name]))
        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name).clone()  # or it would keep the whole file mapped


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of = read_json_object(path)["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in file_of.values()):
            raise ValueError("weight_map should name files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    missing = sorted({file for file in file_of.values() if not (path.parent / file).is_file()})
    if missing:
        raise ValueError(f"{path.parent} is not complete: {', '.join(missing)} of {path.name} missing")
    return file_of


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    """Return {name: (shape, dtype)} of the tensors in one file."""
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
    """Write the tensors of ``shapes``, each file of ``max_file_size`` (such as "2GB") in memory; return file names."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    empty: dict[str, Tensor] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_file_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = {name: read(name).to(dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    if plan.is_sharded:
        write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    return list(plan.filename_to_tensors)


def model_types(architectures: Sequence[Architecture]) -> list[str]:
    """Return transformers' names of the models that ``architectures`` can express."""
    return list(dict.fromkeys(mapping.model_type for each in architectures for mapping in each.huggingface))


def read_config(folder: Path, model_types: Sequence[str]) -> dict[str, Any]:
    """Read config.json, with defaults filled in if it is of one of ``model_types``. Raises ValueError."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model of transformers: it has no config.json")
    written = read_json_object(path)
    kind = SAME_AS.get(str(written.get("model_type")), written.get("model_type"))
    if kind not in model_types:  # others may not even be known to transformers
        return written
    try:
        if kind != written["model_type"]:
            return AutoConfig.for_model(**written | {"model_type": kind}).to_dict()
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # many kinds: transformers checks values with another library
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from error


def from_hf_config(
    hf: Mapping[str, Any], architectures: Sequence[Architecture]
) -> tuple[Architecture, TransformerConfig, int]:
    """Return our architecture, its complete config, and the number of positions. hf: from ``read_config``.

    Raises ValueError, which names each key, if none of ``architectures`` can express the model.
    """
    # The last one wins: GPT's flags describe all models, but a Llama's are shorter.
    kinds = {mapping.model_type: (each, mapping) for each in architectures for mapping in each.huggingface}
    kind = hf.get("model_type")
    if kind not in kinds:
        *others, last = kinds
        raise ValueError(f"model_type is {kind}; {', '.join(others)} and {last} can be imported")
    quantization = hf.get("quantization_config")
    if quantization is not None and not (kind == "gpt_oss" and quantization.get("quant_method") == "mxfp4"):
        raise ValueError("the weights are quantized (quantization_config); import the model they were made from")
    architecture, mapping = kinds[kind]
    config, positions = mapping.from_config(hf)
    config_from_json(dataclasses.asdict(config), type(config))  # before allocating memory
    return architecture, config, positions


def in_memory(
    mapping: HuggingFaceMapping, config: TransformerConfig, read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Return a function that reads a parameter of transformers' model. read: reads a tensor of its files."""
    made = {parameter.name: parameter for parameter in mapping.in_memory(config)}
    return lambda name: made[name].join(*map(read, made[name].tensors)) if name in made else read(name)


def their_shapes(
    architecture: Architecture, config: TransformerConfig, mapping: HuggingFaceMapping
) -> dict[str, torch.Size]:
    """Return {name: shape} of every tensor in the files of transformers' model."""
    ours = architecture.build_empty(config).state_dict()
    return {
        name: tensor.shape
        for weight in mapping.weights(config)
        for name, tensor in zip(weight.theirs, weight.split(*(ours[name] for name in weight.ours)), strict=True)
    }


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generation_settings(settings: Mapping[str, Any], tokens: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the special tokens for config.json, and the content of generation_config.json.

    Keeps what generate() reads beside the tokenizer of an imported model, lists of end tokens too, and adds our end of
    documents. tokens: ids of our tokenizer, used without such files. Raises ValueError.
    """
    path = settings.get("tokenizer_model") or settings.get("vocab_file")
    if not tokens or path is None:
        return dict(tokens), dict(tokens)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    files = folder / "config.json", folder / "generation_config.json"
    config, generation = (read_json_object(file) if file.is_file() else {} for file in files)
    if not generation:
        return dict(tokens), dict(tokens)
    theirs, ours = generation.get("eos_token_id", config.get("eos_token_id")), tokens["eos_token_id"]
    ends = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    ends = ends if ours in ends else [ours, *ends]
    end = {"eos_token_id": ends if isinstance(theirs, list) or len(ends) > 1 else ours}
    kept = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    return tokens | kept | end, tokens | generation | end
