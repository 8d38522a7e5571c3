"""Whose checkpoints are in a folder that holds none of ours, and how to bring their weights here."""

from __future__ import annotations

from pathlib import Path

from .files import CheckpointError
from .meta import MARKER, META

_IMPORT = "then bring it here with tools/import_hf.py, and load that with --finetune"
_VIA_HUGGING_FACE = f"it cannot be read here; make a Hugging Face model of it with its own tools, {_IMPORT}"


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds checkpoints of another program, or is itself one of ours."""
    if (folder / META).exists() and (folder / MARKER).exists():
        raise CheckpointError(
            f"{folder} is one checkpoint, not a folder of checkpoints: give --load the folder that it is in, and its "
            "iteration with --ckpt-step"
        )
    whose = _whose(folder)
    if whose is not None:
        raise CheckpointError(f"{folder} holds {whose}")


def _whose(folder: Path) -> str | None:
    """Told by the names of files alone: nothing is opened."""

    def has(*patterns: str) -> bool:
        return any(next(folder.glob(pattern), None) is not None for pattern in patterns)

    if has("mp_rank_*/model_optim_rng.pt", "*/mp_rank_*/model_optim_rng.pt", "*/mp_rank_*/distrib_optim.pt"):
        return f"a checkpoint of Megatron-LM (--ckpt-format torch): {_VIA_HUGGING_FACE}"
    if has("common.pt", "iter_*/common.pt", "release/common.pt"):
        return f"a checkpoint of Megatron-LM (--ckpt-format torch_dist): {_VIA_HUGGING_FACE}"
    if has("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt"):
        return f"a checkpoint of DeepSpeed: {_VIA_HUGGING_FACE}"
    if has(".metadata", "*/.metadata", "*.distcp", "*/*.distcp"):
        return f"a checkpoint of torch.distributed.checkpoint, whose pickled index is not read: {_VIA_HUGGING_FACE}"
    if has("config.json") and has("*.safetensors", "pytorch_model*.bin"):
        return f"a Hugging Face model, not a run to go on with: {_IMPORT.removeprefix('then ')}"
    return None
