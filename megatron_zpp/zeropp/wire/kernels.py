"""The compiled operators of csrc/: found, loaded, and described to torch.compile.

    encode(values or peers, addend, error -> wire, new_error)   everything that is sent is written by this one
    decode(peers -> out)                                        everything that arrives is read by this one
    rotate(values -> out)
    move_exponents(exponents, wire -> out)                      scales of elements: scales.py
    measure_moves, write_moves, apply_moves                     moved codes: moves.py

They take the arguments of the WireFormat methods that call them, with each format as its ``table``.
"""

import functools
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# ZEROPP_KERNELS=off quantizes in plain torch; ZEROPP_KERNELS=file.so takes another build of csrc/.
_CHOICE = os.environ.get("ZEROPP_KERNELS")
LIBRARY = Path(_CHOICE or Path(__file__).with_name("_kernels.so"))
_REBUILD = "`pip install --no-build-isolation -e .` in the source tree builds it"
OPERATORS = ("encode", "decode", "rotate", "move_exponents")
BITS = (1, 2, 3, 4, 6, 8)  # widths of codes that they pack
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in csrc/kernel_arguments.h


def _load() -> str | None:
    """Load the operators. Returns why they cannot be used, None if they can."""
    if _CHOICE == "off":
        return "switched off by ZEROPP_KERNELS=off"
    if not LIBRARY.exists():
        return f"there is no {LIBRARY}: {_REBUILD}"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the extension was built for another torch ({error.__cause__ or error}): {_REBUILD}"
    return None


why_not_loaded = _load()
# Built with a torch without CUDA, or without nvcc, the extension has no kernels for a GPU.
has_cuda = why_not_loaded is None and torch.ops.megatron_zpp.has_cuda()


@functools.cache
def why_not_on(device: torch.device) -> str | None:
    """Return why tensors on this device are encoded in plain torch; None if the operators do it."""
    if why_not_loaded is not None:
        return why_not_loaded
    if device.type == "cpu" or (device.type == "cuda" and has_cuda):
        return None
    if device.type == "cuda":
        return f"the extension was built without CUDA: {_REBUILD} with nvcc at hand"
    return f"there are no kernels for {device.type}"


def warn_if_missing(device: torch.device) -> None:
    """Say that quantization will be slow, and what to do."""
    if (reason := why_not_on(device)) is not None:
        logger.warning("quantization runs in plain torch, several times slower: %s", reason)


if why_not_loaded is None:
    # All of them write to their arguments and return nothing: all there is to say is that they may be traced.
    for _name in OPERATORS:
        torch.library.register_fake(f"megatron_zpp::{_name}", lambda *args: None)
