"""ZeRO++ (qwZ, hpZ, qgZ) and LoCo for any model that PyTorch FSDP2 shards. Needs torch alone."""

from .api import ZeroPP, apply_zeropp
from .config import LoCoConfig, ZeroPPConfig
from .fsdp.shared import Traffic
from .fsdp.topology import Topology, build_topology
from .muon.optimizer import Muon
from .recipes import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "LoCoConfig",
    "Muon",
    "Recipe",
    "Topology",
    "Traffic",
    "ZeroPP",
    "ZeroPPConfig",
    "apply_zeropp",
    "build_topology",
]
