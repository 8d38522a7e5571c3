"""A small checkpoint, made without a run."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import save_tensors
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.families import GPT
from megatron_zpp.settings.groups import Settings

SHAPES = {"model.first": (4, 3), "model.second": (5,)}


FLAGS_OF_RUN = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 9 --mock-data --vocab-size 16 --make-vocab-size-divisible-by 16"
)


@functools.cache
def settings_of_run() -> Settings:
    return parse_settings(GPT, FLAGS_OF_RUN.split(), note=lambda text: None)


def meta_of(iteration: int, **more: Any) -> dict[str, Any]:
    """Return a run's meta.json without files."""
    settings = settings_of_run()
    return {
        "settings": settings.as_flat_dict(),
        "model_config": dataclasses.asdict(GPT.build_model(settings.model, 16).config),
        "counters": dataclasses.asdict(Counters(iteration=iteration)),
        "schedule": None,
        "loss_scaler": {"scale": 1.0, "clean_steps": 0, "tolerance": 2},
    } | more


def save(folder: Path, iteration: int, value: float = 1.0, **more: Any) -> Path:
    """Save two parameters, filled with ``value``."""
    tensors = {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}
    return save_tensors(str(folder), SHAPES, tensors.__getitem__, meta_of(iteration, **more), iteration)


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def rewrite(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change meta.json or index.json, with correct digests: ``change`` returns the new value, or alters it."""
    value = json.loads((checkpoint / name).read_text())
    changed = change(value)
    replace(checkpoint, name, json.dumps(value if changed is None else changed).encode())


def replace(checkpoint: Path, name: str, text: bytes) -> None:
    """Do the same with bytes that may be no JSON."""
    (checkpoint / name).write_bytes(text)
    if name != "meta.json":
        meta = json.loads((checkpoint / "meta.json").read_text())
        meta["files"][name] |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        text = json.dumps(meta).encode()
        (checkpoint / "meta.json").write_bytes(text)
    (checkpoint / "complete").write_text(hashlib.sha256(text).hexdigest())
