"""meta.json, the readable part of a checkpoint: settings, counters, model. Every value is checked before it is used."""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from megatron_zpp.families import ARCHITECTURES, Architecture, find_architecture
from megatron_zpp.models.transformer import TransformerConfig
from megatron_zpp.settings.groups import with_current_names

from .files import CheckpointError, digest, open_regular, parse_json, read_regular

META, INDEX, MARKER = "meta.json", "index.json", "complete"
REMEDY = "load another checkpoint with --ckpt-step, or the newest good one with --load-latest-good"

_Kinds = tuple[type, ...]
_TEXT: _Kinds = (str, type(None))
_NUMBER: _Kinds = (int, float)
_REQUIRED: dict[str, _Kinds] = {
    "iteration": (int,),
    "world_size": (int,),
    "has_optimizer": (bool,),
    "has_rng": (bool,),
    "zeropp": (dict, type(None)),
    "settings": (dict,),
    "model_config": (dict,),
    "counters": (dict,),
    "schedule": (dict, type(None)),
    "loss_scaler": (dict,),
    "files": (dict,),
}
_OPTIONAL: dict[str, _Kinds] = {  # left out by earlier versions, or by imports
    "optimizers_have_stepped": (list,),  # of each island
    "layout": (dict,),
    "loss_scalers": (list,),  # of each island
    "data_order": (dict, type(None)),
    "tokens": (int,),
    "loss": (*_NUMBER, type(None)),
    "nonfinite": (list,),
    "saved_at": (str,),
    "torch": (str,),
}
_SETTINGS: dict[str, _Kinds] = {  # that are used, and not only compared
    "architecture": (str,),
    "seq_length": (int,),
    "max_position_embeddings": (int, type(None)),
    "tokenizer_type": _TEXT,
    "tokenizer_model": _TEXT,
    "vocab_file": _TEXT,
    "merge_file": _TEXT,
    "vocab_size": (int, type(None)),
}
_LOSS_SCALER: dict[str, _Kinds] = {"scale": _NUMBER, "clean_steps": (int,), "tolerance": (int,)}
_MAX_DEPTH = 10
_MOST_LAYERS = 10_000  # a module is built for each


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Read meta.json and check it against the marker. Raises CheckpointError."""
    path = checkpoint / META
    try:
        text = read_regular(path)
        if digest(text).encode() != read_regular(checkpoint / MARKER).strip():
            raise ValueError(f"its digest is not the one in {MARKER}")
        meta = parse_json(text)
        _check_meta(meta)
        meta["settings"] = with_current_names(meta["settings"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {REMEDY}") from error
    return meta


def open_in(checkpoint: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint for reading; raises CheckpointError for what is not a regular file of its folder."""
    if not is_plain_name(name):
        raise CheckpointError(f"{name!r} is not the name of a file of the checkpoint {checkpoint}")
    return cast(BufferedReader, open_regular(checkpoint / name))


def is_plain_name(name: Any) -> bool:
    """Whether a name that was read from a checkpoint stays in its folder."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def nonfinite(checkpoint: Path, meta: Mapping[str, Any]) -> str | None:
    """Describe NaN or Inf in a checkpoint in one line; None where there is none, or none was recorded."""
    names = meta.get("nonfinite", [])
    if not names:
        return None
    return f"{checkpoint} is not finite: it was saved with NaN or Inf in {', '.join(names)}"


def _check_meta(meta: Any) -> None:
    """Raise ValueError unless every value is of its kind, and files are plain names."""
    _check_kinds("", meta, _REQUIRED)
    _check_kinds("", meta, {key: kinds for key, kinds in _OPTIONAL.items() if key in meta})
    _check_depth(meta)
    for key in ("iteration", "world_size", "tokens"):
        if not 0 <= meta.get(key, 0) < 2**63:
            raise ValueError(f"{key} is {_short(meta[key])}")
    if not _is_finite(meta.get("loss") or 0):
        raise ValueError(f"loss is {_short(meta['loss'])}")
    _check_kinds("settings.", meta["settings"], _SETTINGS)
    parts = {f"model_config.{key}": part for key, part in meta["model_config"].items() if isinstance(part, dict)}
    groups = {"settings": meta["settings"], "schedule": meta["schedule"] or {}, **parts}
    for group, values in groups.items():
        for key, value in values.items():
            if isinstance(value, dict):
                raise ValueError(f"{group}.{key} is {_short(value)}")
    for key, value in meta["counters"].items():
        if type(value) not in _NUMBER or not _is_finite(value) or value < 0:
            raise ValueError(f"the counter {key} is {_short(value)}")
    for scaler in (meta["loss_scaler"], *meta.get("loss_scalers", [])):
        _check_kinds("loss_scaler.", scaler, _LOSS_SCALER)
        if not (_is_finite(scaler["scale"]) and scaler["scale"] > 0):
            raise ValueError(f"loss_scaler.scale is {_short(scaler['scale'])}")
    datasets = (meta.get("data_order") or {}).get("datasets", [])
    if type(datasets) is not list or any(type(order) is not dict for order in datasets):
        raise ValueError(f"data_order.datasets is {_short(datasets)}")
    if any(type(name) is not str for name in meta.get("nonfinite", [])):
        raise ValueError(f"nonfinite is {_short(meta['nonfinite'])}")
    for name, entry in meta["files"].items():
        _check_file(name, entry)


def _check_file(name: str, entry: Any) -> None:
    if not is_plain_name(name):
        raise ValueError(f"it names the file {_short(name)}, which is not in the checkpoint")
    _check_kinds(f"files.{name}.", entry, {"bytes": (int,), "sha256": (str,)})
    if entry["bytes"] < 0:
        raise ValueError(f"files.{name}.bytes is {_short(entry['bytes'])}")
    if "crc32" in entry:  # left out by earlier versions, and for index.json
        _check_kinds(f"files.{name}.", entry, {"crc32": (str,), "piece_bytes": (int,)})
        piece, crc32 = entry["piece_bytes"], entry["crc32"]
        if (
            not 1 <= piece < 2**31
            or len(crc32) != 8 * -(-entry["bytes"] // piece)
            or not re.fullmatch("[0-9a-f]*", crc32)
        ):
            raise ValueError(f"files.{name}.crc32 is not of as many pieces as the file has")


def _check_kinds(where: str, values: Any, kinds: Mapping[str, _Kinds]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where.removesuffix('.') or 'the whole of it'} is no JSON object")
    missing = kinds.keys() - values.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(where + key for key in sorted(missing))}")
    for key, allowed in kinds.items():
        if type(values[key]) not in allowed:  # type: a bool is no number
            raise ValueError(f"{where}{key} is {_short(values[key])}")


def _check_depth(meta: Any) -> None:
    """Raise ValueError for what is nested so deeply that comparing or printing it might fail."""
    level = [meta]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
    if level:
        raise ValueError("its values are nested too deeply")


def _is_finite(value: int | float) -> bool:
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _short(value: Any) -> str:
    return reprlib.repr(value)


@dataclass
class Counters:
    """How far a run is; a checkpoint keeps it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # as the learning-rate schedule counts: skipped steps left out
    skipped_iterations: int = 0
    nan_iterations: int = 0
    cut_tokens: int = 0  # that a curriculum left out of scheduled_samples
    average_loss: float = 0.0  # of the steps so far, moving; 0 = not asked for

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Counters:
        """Read a checkpoint's counters. Raises CheckpointError for damaged ones, or those of another version."""
        saved, later = meta["counters"], {"average_loss", "cut_tokens"}  # earlier versions had none
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted((saved.keys() | later) ^ names)
        wrong += [name for name in sorted(names - later - {*wrong}) if type(saved[name]) is not int]
        if wrong or saved["iteration"] != meta["iteration"]:
            raise CheckpointError(
                "the checkpoint's counters are damaged, or of another version of megatron_zpp: "
                f"{reprlib.repr(', '.join(wrong or ['iteration']))}"
            )
        return cls(**saved)

    def is_loss_spike(self, loss: float, factor: float | None) -> bool:
        """Return whether a finite loss is more than ``factor`` times the average, which then moves towards it.

        A spike moves the average no further than its own limit does, so that a loss that stays high is soon believed.
        factor: --loss-spike-factor; None asks for nothing.
        """
        if factor is None:
            return False
        average = self.average_loss or loss
        self.average_loss = 0.98 * average + 0.02 * min(loss, factor * average)
        return loss > factor * average


def saved_model(meta: Mapping[str, Any], given: Architecture | None = None) -> tuple[Architecture, TransformerConfig]:
    """Return architecture and config of a checkpoint's model. meta: of ``read_meta``.

    given: the user's own; without it the checkpoint's name must be one of ours. Raises CheckpointError.
    """
    name = meta["settings"].get("architecture")
    if given is not None:
        check_architecture(meta, given)
        architecture = given
    else:
        try:
            architecture = find_architecture(name)
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint is of the architecture {name}, which is none of ours ({error}): if it is yours, say "
                "where its record is with --architecture package.module:NAME"
            ) from error
    try:
        if architecture in ARCHITECTURES:  # what values others may have, only they know
            check_config(meta["model_config"], architecture.config_class)
        return architecture, (architecture.saved_config or architecture.config_class)(**meta["model_config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's model_config is not one of {architecture.name} ({error})") from error


def check_config(values: Mapping[str, Any], config_class: type, within: str = "") -> None:
    """Raise ValueError where a value is not of its field's type, or a size is none that a model has."""
    for name, hint in typing.get_type_hints(config_class).items():
        kinds = typing.get_args(hint) or (hint,)
        if name not in values:
            continue
        value: Any = values[name]
        part = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
        if part is not None and isinstance(value, Mapping):
            check_config(value, part, f"{name}.")
            continue
        is_number = type(value) is int or (type(value) is float and float in kinds)
        largest = _MOST_LAYERS if name == "num_layers" else 2**31
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits or (is_number and not (0 if float in kinds else 1) <= value <= largest):
            raise ValueError(f"{within}{name} is {reprlib.repr(value)}")


def check_architecture(meta: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise CheckpointError unless the checkpoint is of ``architecture``."""
    name = meta["settings"].get("architecture")
    if name != architecture.name:
        raise CheckpointError(
            f"the checkpoint is of the architecture {name}, not {architecture.name}: use the program or --architecture "
            f"of {name}"
        )
