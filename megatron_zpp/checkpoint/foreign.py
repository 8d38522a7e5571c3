"""Whose checkpoints are in a folder that holds none of ours, and how to bring them here."""

from __future__ import annotations

from pathlib import Path

from .files import CheckpointError
from .meta import MARKER, META

# What ``kind_of`` tells, and whose it is.
KINDS = {
    "torch_dist": "Megatron-LM (--ckpt-format torch_dist)",
    "torch": "Megatron-LM (--ckpt-format torch)",
    "universal": "DeepSpeed, a universal one",
    "deepspeed": "DeepSpeed",
}
_FILES = {
    "torch_dist": ("common.pt",),
    "torch": ("mp_rank_*/model_optim_rng.pt",),
    "universal": ("zero/*/fp32.pt",),
    "deepspeed": ("*mp_rank_*_model_states.pt",),
}


def kind_of(checkpoint: Path) -> str | None:
    """Which of ``KINDS`` a folder is one checkpoint of, by the names of its files alone."""
    return next((kind for kind, patterns in _FILES.items() if _has(checkpoint, *patterns)), None)


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds checkpoints of another program, or is itself one of ours."""
    if (folder / META).exists() and (folder / MARKER).exists():
        raise CheckpointError(
            f"{folder} is one checkpoint, not a folder of checkpoints: give --load the folder that it is in, and its "
            "iteration with --ckpt-step"
        )
    folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    kind = next((kind for path in folders if (kind := kind_of(path)) is not None), None)
    if kind is not None:
        raise CheckpointError(
            f"{folder} holds a checkpoint of {KINDS[kind]}: make one of ours of it with python "
            f"tools/import_megatron.py --input {folder} --save NEW, and give --load NEW"
        )
    if _has(folder, ".metadata", "*/.metadata", "*.distcp", "*/*.distcp"):
        raise CheckpointError(
            f"{folder} holds a checkpoint of torch.distributed.checkpoint, whose names mean nothing here: make a "
            "Hugging Face model of it with its own tools, then bring it here with tools/import_hf.py, and load that "
            "with --finetune"
        )
    if _has(folder, "config.json") and _has(folder, "*.safetensors", "pytorch_model*.bin"):
        raise CheckpointError(
            f"{folder} holds a Hugging Face model, not a run to go on with: bring it here with tools/import_hf.py, and "
            "load that with --finetune"
        )


def _has(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)
