"""What is encoded already as an addend of the next encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from .wire_layout import Compensation, WireLayout


def encoded_addend(format: WireLayout, wires: Tensor | None) -> Compensation:
    """Let an encoding add, in its one pass and in fp32, what buffers uint8 [..., nbytes] say; None = nothing.

    It is LoCo's compensation by an error that is left as it is.
    """
    return Compensation(format, error=wires, new_error=None, beta=0.0, decay=1.0)


def can_be_addend(format: WireLayout) -> bool:
    """Whether the operators of csrc/ add it so: in the forms that LoCo's errors have."""
    return format.code is None or (format.bits == 8 and format.code.scale_dtype == torch.float32)
