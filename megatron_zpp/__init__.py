"""Megatron-style pretraining with ZeRO++ and LoCo on PyTorch FSDP2."""

__version__ = "0.1.0"
