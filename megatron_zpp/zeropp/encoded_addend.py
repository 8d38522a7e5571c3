"""What is encoded already as an addend of the next encoding."""

from __future__ import annotations

from torch import Tensor

from .wire_layout import Compensation, WireLayout


def encoded_addend(format: WireLayout, wires: Tensor | None) -> Compensation:
    """Let an encoding add, in its one pass and in fp32, what buffers uint8 [..., nbytes] say; None = nothing.

    It is LoCo's compensation by an error that is left as it is.
    """
    return Compensation(format, error=wires, new_error=None, beta=0.0, decay=1.0)
