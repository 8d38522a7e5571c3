"""``megatron-zpp env``, or ``python -m megatron_zpp.commands.env``: what a bug report needs.

What was built, versions, devices, network, paths taken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
import sys

import torch
import torch.distributed as dist

from megatron_zpp.zeropp.wire import kernels

_PACKAGES = ("megatron_zpp", "numpy", "sentencepiece", "tokenizers", "transformers", "tensorboard", "wandb")
_VARIABLES = ("CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "ZEROPP_")


def report() -> dict[str, str]:
    """Collect facts by name, in the order in which to read them."""
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs, {torch.backends.cpu.get_cpu_capability()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "CUDA": f"torch built with {torch.version.cuda}" if torch.version.cuda else "torch built without",
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        facts[f"GPU {i}"] = f"{device.name}, {memory}, sm_{device.major}{device.minor}"
    if torch.cuda.device_count() == 0:
        facts["GPU"] = "none"
    backends = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    facts["backends"] = ", ".join(name for name, available in backends.items() if available)
    if dist.is_nccl_available() and torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["host"] = socket.gethostname()
    facts["interfaces"] = ", ".join(name for _, name in socket.if_nameindex())
    for device_type in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        facts |= _paths(torch.device(device_type))
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            facts[name] = os.environ[name]
    return facts


def _paths(device: torch.device) -> dict[str, str]:
    """Say which code each operator of megatron_zpp.zeropp runs for tensors on ``device``."""
    reason = kernels.why_not_on(device)
    path = f"plain torch: {reason}" if reason else f"compiled ({kernels.LIBRARY}), plain torch for other types"
    return {f"{operator} on {device}": path for operator in kernels.OPERATORS}


def main() -> None:
    argparse.ArgumentParser(description="What a bug report needs.", allow_abbrev=False).parse_args()
    facts = report()
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")


if __name__ == "__main__":
    main()
