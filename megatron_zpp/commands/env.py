"""``megatron-zpp env``, or ``python -m megatron_zpp.commands.env``: print what a bug report needs."""

import argparse
import importlib.metadata
import os
import platform
import socket
import sys

import torch
import torch.distributed as dist

from megatron_zpp.errors import reports_errors
from megatron_zpp.zeropp.wire import kernels

_PACKAGES = ("megatron_zpp", "numpy", "sentencepiece", "tokenizers", "transformers", "tensorboard", "wandb")
_VARIABLES = ("CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "ZEROPP_")


@reports_errors
def main() -> None:
    argparse.ArgumentParser(description="Print what a bug report needs.", allow_abbrev=False).parse_args()
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
        gpu = torch.cuda.get_device_properties(i)
        facts[f"GPU {i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    if torch.cuda.device_count() == 0:
        facts["GPU"] = "none"
    backends = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    facts["backends"] = ", ".join(name for name, available in backends.items() if available)
    if dist.is_nccl_available() and torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["host"] = socket.gethostname()
    facts["interfaces"] = ", ".join(name for _, name in socket.if_nameindex())
    for device_type in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        device = torch.device(device_type)
        reason = kernels.why_not_on(device)
        path = f"plain torch: {reason}" if reason else f"compiled ({kernels.LIBRARY}), plain torch for other types"
        facts |= {f"{operator} on {device}": path for operator in kernels.OPERATORS}
    facts |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")


if __name__ == "__main__":
    main()
