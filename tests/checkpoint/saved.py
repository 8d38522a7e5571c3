"""A small checkpoint, made without a run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import save_parameters
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.families import GPT
from megatron_zpp.settings.groups import Settings

SHAPES = {"first": (4, 3), "second": (5,)}


@functools.cache
def settings_of_run() -> Settings:
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3"
    flags += " --train-iters 9 --mock-data --vocab-size 16 --make-vocab-size-divisible-by 16"
    return parse_settings(GPT, flags.split(), note=lambda text: None)


def meta_of(iteration: int, **more: Any) -> dict[str, Any]:
    """What a run would say of itself."""
    settings = settings_of_run()
    return {
        "settings": settings.as_flat_dict(),
        "model_config": dataclasses.asdict(GPT.build_model(settings.model, 16).config),
        "counters": dataclasses.asdict(Counters(iteration=iteration)),
        "schedule": None,
        "loss_scaler": {"scale": 1.0, "clean_steps": 0, "tolerance": 2},
    } | more


def save(folder: Path, iteration: int, value: float = 1.0, **more: Any) -> Path:
    """Two parameters, filled with ``value``."""
    tensors = {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}
    return save_parameters(str(folder), [*SHAPES.items()], tensors.__getitem__, meta_of(iteration, **more), iteration)


def rewrite(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change meta.json or index.json as if it had been saved so: ``change`` returns the new value, or alters it."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    value = meta if name == "meta.json" else json.loads((checkpoint / name).read_text())
    changed = change(value)
    text = json.dumps(value if changed is None else changed).encode()
    replace(checkpoint, name, text)


def replace(checkpoint: Path, name: str, text: bytes) -> None:
    """The same with bytes that may be no JSON."""
    (checkpoint / name).write_bytes(text)
    if name != "meta.json":
        meta = json.loads((checkpoint / "meta.json").read_text())
        meta["files"][name] |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        text = json.dumps(meta).encode()
        (checkpoint / "meta.json").write_bytes(text)
    (checkpoint / "complete").write_text(hashlib.sha256(text).hexdigest())
