"""``megatron-zpp env``, or ``python -m megatron_zpp.commands.env``: print what a bug report needs."""

import argparse
import importlib.metadata
import os
import socket

import torch
from torch.utils.collect_env import get_pretty_env_info

from megatron_zpp.errors import reports_errors
from megatron_zpp.zeropp.wire import kernels

_PACKAGES = ("megatron_zpp", "sentencepiece", "tokenizers", "transformers", "tensorboard", "wandb")
_VARIABLES = ("CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "ZEROPP_")


@reports_errors
def main() -> None:
    argparse.ArgumentParser(description="Print what a bug report needs.", allow_abbrev=False).parse_args()
    facts: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
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
    print(f"\n{get_pretty_env_info()}")


if __name__ == "__main__":
    main()
