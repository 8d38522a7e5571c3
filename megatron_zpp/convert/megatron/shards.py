"""Read Megatron-LM's `torch` format and DeepSpeed's: a file per tensor- and pipeline-parallel rank, or per parameter.

    iter_0000100/mp_rank_00/model_optim_rng.pt          Megatron-LM; mp_rank_00_000 with a pipeline
    global_step100/mp_rank_00_model_states.pt           Megatron-DeepSpeed,
    global_step100/layer_01-model_00-model_states.pt    with its PipelineModule one more per module

Tensor-parallel ranks have rows or columns of a tensor; stages number their layers from 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.folder import KINDS

from .config import MOMENTS, Args, Saved, args_in, config_of
from .pickles import load_file
from .weights import Weight, canonical, canonical_pipeline_names, layer_of, rename_layer, weights

Shards = dict[str, list[Tensor]]  # per tensor-parallel rank, by canonical name


def open_torch(folder: Path) -> Saved:
    """Open a folder with Megatron-LM's ``mp_rank_*``. Raises CheckpointError."""
    first = load_file(min(folder.glob("mp_rank_*/model_optim_rng.pt")))
    args = args_in(first, str(folder))
    tp, pp = _parallel_size(args, "tensor"), _parallel_size(args, "pipeline")
    ranks = [[f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}" for t in range(tp)] for p in range(pp)]
    files = [[folder / rank / "model_optim_rng.pt" for rank in stage] for stage in ranks]
    _require_files(folder, [file for stage in files for file in stage], "tensor- and pipeline-parallel ranks")
    stages = [[_chunks(load_file(file), file) for file in stage] for stage in files]
    shards: Shards = {}
    layers = 0
    for chunk in range(len(stages[0][0])):  # a stage of a virtual pipeline has several
        for stage in stages:
            if any(len(rank) != len(stages[0][0]) for rank in stage):
                raise CheckpointError(f"{folder} is damaged: its ranks have other numbers of virtual stages")
            layers += _add_stage(shards, [rank[chunk] for rank in stage], layers)
    return _saved(str(folder), "torch", args, first, shards)


def open_deepspeed(folder: Path) -> Saved:
    """Open a folder with DeepSpeed's ``mp_rank_*_model_states.pt``. Raises CheckpointError."""
    found = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not found:
        raise CheckpointError(f"{folder} is divided by ZeRO-3: import what DeepSpeed's ds_to_universal.py makes of it")
    first = load_file(found[0])
    args = args_in(first, str(folder))
    tp = _parallel_size(args, "tensor")
    shards: Shards = {}
    if first.get("module") is not None:
        files = [folder / f"mp_rank_{t:02d}_model_states.pt" for t in range(tp)]
        _require_files(folder, files, "tensor-parallel ranks")
        _add_stage(shards, [_flatten(load_file(file).get("module"), file) for file in files], 0)
    else:
        modules = sorted({int(path.name[6:].partition("-")[0]) for path in folder.glob("layer_*-model_*")})
        files = [folder / f"layer_{m:02d}-model_{t:02d}-model_states.pt" for m in modules for t in range(tp)]
        _require_files(folder, files, "tensor-parallel ranks")
        for t in range(tp):
            numbered = {
                f"{module}.{name}": tensor
                for module, file in zip(modules, files[t::tp], strict=True)
                for name, tensor in _flatten(load_file(file), file).items()
            }
            for name, new in canonical_pipeline_names(numbered).items():
                ranks = shards.setdefault(new, [])
                if len(ranks) == t:  # tied embeddings come twice
                    ranks.append(numbered[name])
    return _saved(str(folder), "deepspeed", args, first, shards)


def _parallel_size(args: Args, kind: str) -> int:
    value = args.get(f"{kind}_model_parallel_size", 1)
    if type(value) is not int or not 1 <= value <= 2**16:
        raise CheckpointError(f"the checkpoint's flag {kind}_model_parallel_size is {value!r}, not a size")
    return value


def _require_files(folder: Path, files: Sequence[Path], ranks: str) -> None:
    missing = [str(file.relative_to(folder)) for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{folder} is not complete: {', '.join(missing[:3])}{more} missing, files of its {ranks}")


def _chunks(state: Any, file: Path) -> list[dict[str, Tensor]]:
    """Return the tensors of a rank's stages: several in a virtual pipeline."""
    state = state if isinstance(state, dict) else {}
    numbers = sorted(int(name[5:]) for name in map(str, state) if re.fullmatch("model[0-9]{1,6}", name))
    names = [f"model{number}" for number in numbers] or ["model"]
    return [_flatten(state.get(name), file) for name in names]


def _flatten(state: Any, file: Path) -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries, names joined by dots."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is damaged: it has no dictionary of tensors")

    def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            for key, child in value.items():
                yield from walk(child, f"{name}.{key}" if name else str(key))

    return dict(walk(state, ""))


def _add_stage(shards: Shards, states: Sequence[Mapping[str, Tensor]], first_layer: int) -> int:
    """Add the tensors of one stage's tensor-parallel ranks; return its number of layers."""
    ranks = [{new: x for name, x in state.items() if (new := canonical(name)) is not None} for state in states]
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        differing = sorted(ranks[0].keys() ^ next(r.keys() for r in ranks if r.keys() != ranks[0].keys()))
        raise CheckpointError(f"tensor-parallel ranks do not have the same tensors: {', '.join(differing[:3])}")
    layers = set()
    for name in ranks[0]:
        layer = layer_of(name)
        layers.add(layer)
        new = name if layer is None else rename_layer(name, first_layer + layer)
        shards.setdefault(new, [rank[name] for rank in ranks])  # tied embeddings come again on the last stage
    return len(layers - {None})


def _saved(path: str, kind: str, args: Args, state: Mapping[str, Any], shards: Shards) -> Saved:
    config = config_of(args, 1)
    if config.moe is not None or config.multi_latent_attention:
        kind_of = "a mixture of experts" if config.moe is not None else "latent attention"
        raise CheckpointError(f"{path} is of {kind_of}, which is imported from the format torch_dist alone")
    if config.tie_embeddings:
        shards.pop("output_layer.weight", None)  # the last stage's copy
    table = {weight.theirs: weight for weight in weights(config)}
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float):
        raise CheckpointError(f"{path} is damaged: its checkpoint_version is {version!r}")
    if version < 2:  # queries, keys and values of all heads are apart
        old = f"{path} is of Megatron-LM before 2021 (checkpoint_version {version})"
        raise CheckpointError(f"{old}: load and save it with Megatron-LM, which still sorts them, and import that")

    def read(name: str, moment: str) -> Tensor:
        return _merge(table[name], shards[name], path)

    return Saved(path, KINDS[kind][0], args, state, frozenset(shards), read, has_moments=False)


def _merge(weight: Weight, shards: Sequence[Tensor], path: str) -> Tensor:
    """Join the shards of tensor-parallel ranks. Raises CheckpointError."""
    if weight.sharded_dim is None or len(shards) == 1:
        return shards[0]
    try:
        if not weight.is_stacked:
            return torch.cat(list(shards), dim=weight.sharded_dim)
        halves = [shard.tensor_split(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(shard.shape)) for shard in shards)
        raise CheckpointError(f"{path}: shards of {weight.theirs} do not make up a tensor: {shapes}") from error


def open_universal(folder: Path) -> Saved:
    """Open DeepSpeed's universal checkpoint, each parameter whole and in fp32. Raises CheckpointError.

    mp_rank_00_model_states.pt has flags and counters; zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt {"param": …}.
    """
    states = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    if not states:
        raise CheckpointError(f"{folder} is not complete: mp_rank_00_model_states.pt is missing")
    state = load_file(states[0])
    args = args_in(state, str(folder))
    folders = {path.parent.name: path.parent for path in (folder / "zero").glob("*/fp32.pt")}
    names = {new: folders[name] for name, new in canonical_pipeline_names(sorted(folders)).items()}
    has_moments = all((path / f"{moment}.pt").is_file() for path in names.values() for moment in MOMENTS)

    def param(file: Path) -> Any:
        content = load_file(file)
        return content.get("param") if isinstance(content, dict) else content

    def read(name: str, moment: str) -> Tensor:
        file = names[name] / f"{moment or 'fp32'}.pt"
        if not isinstance(tensor := param(file), Tensor):
            raise CheckpointError(f"{file} is damaged: it does not hold a tensor")
        return tensor

    def steps(name: str) -> int | None:
        file = names[name] / "step.pt"
        if not file.is_file():
            return None
        value = param(file)
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise CheckpointError(f"{file} is damaged: it does not hold a number")
        return int(value)

    return Saved(str(folder), KINDS["universal"][0], args, state, frozenset(names), read, has_moments, steps)
