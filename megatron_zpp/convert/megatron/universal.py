"""DeepSpeed's universal checkpoints: each parameter in a folder of its own, whole and in fp32, with Adam's moments.

global_step100_universal/mp_rank_00_model_states.pt       flags and counters
global_step100_universal/zero/NAME/fp32.pt                {"param": …}; likewise exp_avg.pt and exp_avg_sq.pt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.foreign import KINDS

from .names import of_pipeline
from .pickles import load_file
from .saved import MOMENTS, Saved, args_in


def open_universal(folder: Path) -> Saved:
    """Raises CheckpointError."""
    states = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    if not states:
        raise CheckpointError(f"{folder} is not complete: mp_rank_00_model_states.pt is missing")
    state = load_file(states[0])
    args = args_in(state, str(folder))
    folders = {path.parent.name: path.parent for path in (folder / "zero").glob("*/fp32.pt")}
    names = {new: folders[name] for name, new in of_pipeline(sorted(folders)).items()}
    moments = all((path / f"{moment}.pt").is_file() for path in names.values() for moment in MOMENTS)

    def read(name: str, moment: str) -> Tensor:
        file = names[name] / f"{moment or 'fp32'}.pt"
        content: Any = load_file(file)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{file} is damaged: it holds no tensor")
        return tensor

    def steps(name: str) -> int | None:
        file = names[name] / "step.pt"
        if not file.is_file():
            return None
        value = load_file(file)
        value = value.get("param") if isinstance(value, dict) else value
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise CheckpointError(f"{file} is damaged: it holds no number")
        return int(value)

    return Saved(str(folder), KINDS["universal"], args, state, frozenset(names), read, moments, steps)
