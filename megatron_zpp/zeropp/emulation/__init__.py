"""ZeRO++ and LoCo without ranks: one process computes what many would."""

from .api import EmulatedZeroPP, emulate_zeropp

__all__ = ["EmulatedZeroPP", "emulate_zeropp"]
