"""ZeRO++ (qwZ, hpZ, qgZ) and LoCo for any model that PyTorch FSDP2 shards. Needs torch alone."""

from .api import ZeroPP, apply_zeropp
from .config import LoCoConfig, ZeroPPConfig
from .emulation import EmulatedZeroPP, emulate_zeropp
from .fsdp.shared import Traffic
from .fsdp.topology import Topology, build_topology
from .interface import RandomStates, Ranks, ZeroPPInterface
from .muon.optimizer import Muon
from .own_rank import OwnRank, ranks_of, unmoved
from .recipes import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "EmulatedZeroPP",
    "LoCoConfig",
    "Muon",
    "OwnRank",
    "RandomStates",
    "Ranks",
    "Recipe",
    "Topology",
    "Traffic",
    "ZeroPP",
    "ZeroPPConfig",
    "ZeroPPInterface",
    "apply_zeropp",
    "build_topology",
    "emulate_zeropp",
    "ranks_of",
    "unmoved",
]
