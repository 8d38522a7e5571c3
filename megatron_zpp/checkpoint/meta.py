"""Read meta.json: settings, counters and model of a checkpoint. Checks every value before it is used."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from reprlib import repr as short
from types import NoneType
from typing import Any, cast

from megatron_zpp.data.text.special_tokens import check_description
from megatron_zpp.errors import describe_error
from megatron_zpp.families import ARCHITECTURES, Architecture, find_architecture
from megatron_zpp.files import RequestError
from megatron_zpp.models.transformer import TransformerConfig

from .files import CheckpointError, digest, open_regular, parse_json, read_regular

META, INDEX, MARKER = "meta.json", "index.json", "complete"
FORMAT = 2  # a change that makes older checkpoints unreadable raises this number
REMEDY = "load another checkpoint with --ckpt-step, or the newest good one with --load-latest-good"

_Kinds = dict[tuple[type, ...], str]  # allowed types: names of values
_META: _Kinds = {  # ?: may be missing, as from imports
    (int,): "format iteration world_size tokens?",
    (str,): "saved_at? torch?",
    (bool,): "has_optimizer has_rng unpadded_vocabulary?",  # every row is of the model, as of one from transformers
    (dict,): "settings model_config counters loss_scaler files layout? tokenizer?",
    (dict, NoneType): "zeropp schedule data_order?",
    (list,): "nonfinite optimizers_have_stepped? loss_scalers?",  # the last two: a value for each copy of the model
    (list, NoneType): "streams?",
    (int, float, NoneType): "loss?",
}
_SETTINGS: _Kinds = {  # that are used, not only compared
    (int,): "seq_length",
    (str,): "architecture",
    (int, NoneType): "max_position_embeddings vocab_size",
    (str, NoneType): "tokenizer_type tokenizer_model vocab_file merge_file",
}
_LOSS_SCALER: _Kinds = {(int, float): "scale", (int,): "clean_steps tolerance"}
_MAX_DEPTH = 20
_MAX_LAYERS = 10_000  # a module is built for each


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Read meta.json, and check it against the marker. Raises CheckpointError, RequestError."""
    path = checkpoint / META
    try:
        text = read_regular(path)
        if digest(text).encode() != read_regular(checkpoint / MARKER).strip():
            raise ValueError(f"its digest is not the one in {MARKER}")
        meta = parse_json(text)
        if not (is_other := isinstance(meta, dict) and meta.get("format") != FORMAT):
            _check_meta(meta)
    except RequestError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({describe_error(error)}): {REMEDY}") from error
    if is_other:
        other = f"{path} has the format {short(meta.get('format'))}, and this version reads {FORMAT}"
        raise CheckpointError(f"{other}: load it with the version of megatron_zpp that saved it")
    return meta


def open_in(checkpoint: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint for reading. Raises CheckpointError unless it is a regular file of its folder."""
    if not is_plain_name(name):
        raise CheckpointError(f"{name!r} is not the name of a file of the checkpoint {checkpoint}")
    return cast(BufferedReader, open_regular(checkpoint / name))


def is_plain_name(name: Any) -> bool:
    """Return whether a name that was read from a checkpoint stays in its folder."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def nonfinite(checkpoint: Path, meta: Mapping[str, Any]) -> str | None:
    """Describe the NaN or Inf in a checkpoint; None if there is none."""
    names = ", ".join(meta["nonfinite"])
    return f"{checkpoint} is not finite: it was saved with NaN or Inf in {names}" if names else None


LARGEST_BATCH = 2**24  # samples: what a flag takes


def _check_meta(meta: Any) -> None:
    """Raise ValueError unless every value has its type and range, and files are plain names."""
    _check_kinds("", meta, _META)
    _check_kinds("settings.", meta["settings"], _SETTINGS)
    if _depth(meta) > _MAX_DEPTH:  # comparing or printing might fail
        raise ValueError("its values are nested too deeply")
    parts = {f"model_config.{key}.": part for key, part in meta["model_config"].items() if isinstance(part, dict)}
    groups = {"settings.": meta["settings"], "schedule.": meta["schedule"] or {}, **parts}
    counters, datasets = meta["counters"], (meta.get("data_order") or {}).get("datasets", [])
    wrong = {key: meta[key] for key in ("iteration", "world_size", "tokens") if not 0 <= meta.get(key, 0) < 2**63}
    wrong |= {group + key: x for group, values in groups.items() for key, x in values.items() if isinstance(x, dict)}
    wrong |= {f"the counter {key}": x for key, x in counters.items() if not (_is_finite(x) and x >= 0)}
    for scaler in (meta["loss_scaler"], *meta.get("loss_scalers", [])):
        _check_kinds("loss_scaler.", scaler, _LOSS_SCALER)
        if not (_is_finite(scaler["scale"]) and scaler["scale"] > 0):
            wrong["loss_scaler.scale"] = scaler["scale"]
    for key in ("loss_scalers", "optimizers_have_stepped"):  # one value per copy of the model that trains apart
        if key in meta and len(meta[key]) != meta.get("layout", {}).get("island", 1):
            wrong[key] = meta[key]
    if not wrong and counters.get("consumed_train_samples", 0) > LARGEST_BATCH * meta["iteration"]:
        wrong["the counter consumed_train_samples"] = counters["consumed_train_samples"]
    if not _is_finite(meta.get("loss") or 0):
        wrong["loss"] = meta["loss"]
    stepped = meta.get("optimizers_have_stepped", [True]) or [None]
    lists = (("data_order.datasets", datasets, dict), ("nonfinite", meta["nonfinite"], str))
    for key, values, kind in (*lists, ("optimizers_have_stepped", stepped, bool)):
        if type(values) is not list or any(type(value) is not kind for value in values):
            wrong[key] = values
    if wrong:
        raise ValueError("; ".join(f"{name} is {short(value)}" for name, value in list(wrong.items())[:3]))
    if "tokenizer" in meta:
        check_description(meta["tokenizer"])
    for name, entry in meta["files"].items():
        if not is_plain_name(name):
            raise ValueError(f"it names the file {short(name)}, which is not in the checkpoint")
        _check_kinds(f"files.{name}.", entry, {(int,): "bytes", (str,): "sha256"})
        if not 0 <= entry["bytes"] < 2**60:
            raise ValueError(f"files.{name}.bytes is {short(entry['bytes'])}")


def _check_kinds(where: str, values: Any, kinds: _Kinds) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where.removesuffix('.') or 'the whole of it'} is not a JSON object")
    allowed = {name: types for types, names in kinds.items() for name in names.split()}
    if missing := [where + name for name in allowed if not name.endswith("?") and name not in values]:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    for name, types in allowed.items():
        if type(value := values.get(name.rstrip("?"), types[0]())) not in types:  # a bool is not a number
            raise ValueError(f"{where}{name.rstrip('?')} is {short(value)}")


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0)


def _is_finite(value: Any) -> bool:
    return abs(value) < 2**63 if type(value) is int else type(value) is float and math.isfinite(value)


@dataclass
class Counters:
    """Progress of a run, saved with it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # for the learning-rate schedule: without skipped steps
    skipped_iterations: int = 0
    nan_iterations: int = 0
    cut_tokens: int = 0  # that a curriculum left out of scheduled_samples
    average_loss: float = 0.0  # moving average over steps; 0: not tracked

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Counters:
        """Read a checkpoint's counters. Raises CheckpointError if they are damaged, or of another version."""
        saved, types = meta["counters"], {field.name: type(field.default) for field in dataclasses.fields(cls)}
        wrong = sorted(saved.keys() ^ types.keys()) or [name for name in types if type(saved[name]) is not types[name]]
        if not wrong and saved["iteration"] != meta["iteration"]:
            wrong = ["iteration"]
        if wrong:
            names = short(", ".join(wrong))
            raise CheckpointError(f"the checkpoint's counters are damaged, or of another version: {names}")
        return cls(**saved)

    def is_loss_spike(self, loss: float, factor: float | None) -> bool:
        """Return whether a finite loss exceeds ``factor`` (--loss-spike-factor) times the moving average; update it.

        A spike counts as that limit in the average, so that a loss that stays high is soon accepted. None: False.
        """
        if factor is None:
            return False
        average = self.average_loss or loss
        self.average_loss = 0.98 * average + 0.02 * min(loss, factor * average)
        return loss > factor * average


def num_tokens(meta: Mapping[str, Any]) -> int:
    """Return how many rows of a checkpoint's vocabulary belong to tokens: all, where it does not say otherwise."""
    rows: int = meta["model_config"]["vocab_size"]
    return rows if meta.get("unpadded_vocabulary") else min(meta.get("tokenizer", {}).get("vocab_size", rows), rows)


def saved_model(
    meta: Mapping[str, Any], given: Architecture | None = None, with_adapters: bool = False
) -> tuple[Architecture, TransformerConfig]:
    """Return architecture and config of a checkpoint's model; ``given``: the user's own. Raises CheckpointError.

    with_adapters: whether it may hold adapters alone.
    """
    if meta["settings"].get("lora_rank") is not None and not with_adapters:
        raise CheckpointError(
            "the checkpoint holds adapters without their base: export-peft writes them for PEFT, which adds them to it"
        )
    name = meta["settings"]["architecture"]
    if given is not None and name != given.name:
        use = f"use the program or --architecture of {name}"
        raise CheckpointError(f"the checkpoint is of the architecture {name}, not {given.name}: {use}")
    architecture = given
    if architecture is None:
        try:
            architecture = find_architecture(name)
        except ValueError as error:
            foreign = f"the checkpoint is of the architecture {name}, which is not one of ours ({error})"
            raise CheckpointError(f"{foreign}: if it is yours, give --architecture package.module:NAME") from error
    try:
        if architecture not in ARCHITECTURES:  # only its program knows its valid values
            return architecture, architecture.config_class(**meta["model_config"])
        return architecture, config_from_json(meta["model_config"], architecture.config_class)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's model_config is not one of {architecture.name} ({error})") from error


def config_from_json(values: Mapping[str, Any], config_class: type[Any], within: str = "") -> Any:
    """Build a config of a model, and the configs in it, from JSON.

    Raises ValueError if a value is not of its field's type, or not a size of a model; TypeError for other fields.
    """
    parts = {}
    for name, hint in typing.get_type_hints(config_class).items():
        kinds = typing.get_args(hint) or (hint,)
        if name not in values:
            continue
        value: Any = values[name]
        part = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
        if part is not None and isinstance(value, Mapping):
            parts[name] = config_from_json(value, part, f"{name}.")
            continue
        is_number = type(value) is int or (type(value) is float and float in kinds)
        largest = _MAX_LAYERS if name == "num_layers" else 2**31
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits or (is_number and not (0 if float in kinds else 1) <= value <= largest):
            raise ValueError(f"{within}{name} is {short(value)}")
    return config_class(**{**values, **parts})
