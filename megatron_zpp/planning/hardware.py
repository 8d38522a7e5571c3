"""What data sheets and published measurements say of GPUs and links, for clusters that nobody has measured yet.

Peaks of arithmetic are in ``metrics/throughput.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by its maker's data sheet."""

    memory_gb: float
    memory_gbytes: float  # GB/s of its memory
    link_gbytes: float  # GB/s to the other GPUs of its node in one direction: NVLink or the like, else PCIe
    # Of the peak, that attention reaches. FlashAttention-2's authors say 50 to 73 % on an A100 (arXiv 2307.08691), and
    # 35 % on an H100 (arXiv 2407.08608); of others the lower one is assumed.
    attention_efficiency: float = 0.35


# By the name that users give; the plain name is the SXM one.
GPUS = {
    "T4": Gpu(16, 320, 16),
    "V100": Gpu(32, 900, 150),
    "A10G": Gpu(24, 600, 32),
    "L4": Gpu(24, 300, 32),
    "L40S": Gpu(48, 864, 32),
    "A100-40GB": Gpu(40, 1555, 300, 0.5),
    "A100": Gpu(80, 2039, 300, 0.5),
    "A800": Gpu(80, 2039, 200, 0.5),
    "H100": Gpu(80, 3350, 450),
    "H100-PCIe": Gpu(80, 2000, 64),
    "H800": Gpu(80, 3350, 200),
    "H200": Gpu(141, 4800, 450),
    "GH200": Gpu(96, 4000, 450),
    "B200": Gpu(180, 8000, 900),
    "MI300X": Gpu(192, 5300, 448),
}

# The share of a link's nominal rate that collectives reach with large messages. Voltage Park measured 323.5 GB/s of
# 8 x 400 Gbit/s with NCCL's all-gather on 4 nodes of 8 H100 (0.81); DeepSpeed 660 of a DGX-2's 800 Gbit/s (0.83).
LINK_SHARE = 0.8
# Microseconds that each hop of a ring adds. NCCL's all-reduce of 1 MiB on 8 B200 takes 51, 14 hops
# (stas00/ml-engineering, network/README.md); between nodes the same page's figures make 29 over EFA, and InfiniBand
# takes a few. Of such measurements a ring's formula explains the order of magnitude, no more.
LATENCY_WITHIN, LATENCY_BETWEEN = 3.6, 10.0
# The share of the memory's bandwidth that kernels reach: norms, quantization, the optimizer. An assumption.
MEMORY_SHARE = 0.7
# The share of the peak that matrix products of a model reach: one constant for each kind of
# GPU, which ``benchmarks/planner.py published`` fits to published measurements. V100's is of ten rows of one shared
# cluster. Others get the plain default.
DEFAULT_EFFICIENCY = 0.5
EFFICIENCIES = {"V100": 0.23, "A100-40GB": 0.65, "A100": 0.62, "H100": 0.49}
