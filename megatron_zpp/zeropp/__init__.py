"""ZeRO++ (qwZ, hpZ, qgZ) and LoCo for any model that PyTorch FSDP2 shards. Needs torch alone."""

from .api import ZeroPP, apply_zeropp
from .config import LoCoConfig, ZeroPPConfig
from .emulation import EmulatedZeroPP, emulate_zeropp
from .topology import Topology, build_topology
from .traffic import Traffic

__all__ = [
    "EmulatedZeroPP",
    "LoCoConfig",
    "Topology",
    "Traffic",
    "ZeroPP",
    "ZeroPPConfig",
    "apply_zeropp",
    "build_topology",
    "emulate_zeropp",
]
