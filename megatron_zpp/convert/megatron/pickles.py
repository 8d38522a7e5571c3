"""What torch.save and torch.distributed.checkpoint wrote, read without running any of it.

A pickle names classes and functions, and unpickling calls them. Here a name is either one that only makes plain values
(a tensor, a size), or stands in a list of what Megatron and DeepSpeed put into their files, and becomes a ``StandIn``,
which keeps what it was called with. Any other name refuses the file.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_zpp.checkpoint import CheckpointError


class StandIn:
    """What a file has an object of another class for: what it was made with, and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


# Beside tensors and plain values; by the names that their authors' programs give them.
_IN_FILES = (
    # Enumerations among the flags
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.enums.AttnMaskType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.AttnMaskType",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
    "megatron.legacy.model.enums.ModelType",
    "signal.Signals",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "types.SimpleNamespace",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    # What Transformer Engine keeps beside weights
    "_io.BytesIO",
    # Fault injection's state
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    # Random states are arrays of numpy
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    # DeepSpeed's loss scalers and settings
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_SAFE: list[Any] = [(argparse.Namespace, "argparse.Namespace"), *((StandIn, name) for name in _IN_FILES)]

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_IN_METADATA: dict[str, Any] = {
    **dict.fromkeys(
        (
            f"{_CHECKPOINT}.BytesStorageMetadata",
            f"{_CHECKPOINT}.ChunkStorageMetadata",
            f"{_CHECKPOINT}.Metadata",
            f"{_CHECKPOINT}.MetadataIndex",
            f"{_CHECKPOINT}.StorageMeta",
            f"{_CHECKPOINT}.TensorProperties",
            f"{_CHECKPOINT}.TensorStorageMetadata",
            f"{_CHECKPOINT}._MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "torch.distributed.checkpoint.planner.SavePlan",
            "torch.distributed.checkpoint.planner.TensorWriteData",
            "torch.distributed.checkpoint.planner.WriteItem",
            "torch.distributed.checkpoint.planner.WriteItemType",
            "torch.serialization._get_layout",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
            "pathlib.Path",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
        ),
        StandIn,
    ),
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
}


def load_file(path: Path) -> Any:
    """What torch.save wrote into a file; tensors stay there until they are used. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or no regular file")
    return _load(path, path, mmap=zipfile.is_zipfile(path))


def load_part(file: BinaryIO, path: Path) -> Any:
    """The same of a part of a file that is open; ``path`` is for messages."""
    return _load(file, path, mmap=False)


def _load(source: Path | BinaryIO, path: Path, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from None
    except Exception as error:  # of many kinds, as the file may say anything
        raise CheckpointError(f"{path} is damaged ({_first_line(error)})") from error


def load_metadata(path: Path) -> Any:
    """The index of torch.distributed.checkpoint, its objects as ``StandIn``s. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or no regular file")
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except CheckpointError:
        raise
    except _RefusedError as refused:
        raise _refusal(path, f"GLOBAL {refused}") from None
    except Exception as error:
        raise CheckpointError(f"{path} is damaged ({_first_line(error)})") from error


class _RefusedError(Exception):
    """A name that is not in the list."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in _IN_METADATA:
            raise _RefusedError(full)
        return _IN_METADATA[full]


def _refusal(path: Path, reason: str) -> CheckpointError:
    name = re.search(r"GLOBAL ([\w.]+)", reason)
    if name is None:
        return CheckpointError(f"{path} is damaged, or is not what torch.save writes ({_first_line(reason)})")
    return CheckpointError(
        f"{path} is not read: unpickling it would call {name[1]}, which is none of what Megatron and DeepSpeed save"
    )


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
