"""Float8 training by torchao: which linear layers compute their products in float8."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from megatron_zpp.data.text.packages import load_package


def check_float8(device: torch.device) -> None:
    """Raise ImportError without torchao, and ValueError for a GPU that has no products of float8."""
    load_package("torchao", "--fp8-format", "fp8")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        old = f"--fp8-format needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and {name} has {version}"
        raise ValueError(f"{old}: leave it out")


def convert_to_float8(blocks: Iterable[nn.Module], recipe: str, emulate: bool, tensor_parallel: int = 1) -> None:
    """Let plain linear layers of ``blocks`` compute in float8, in place; parameters keep names, dtype and sharding.

    Routers, grouped experts, and layers with a size that 16 does not divide, which GPUs have no products for, stay as
    they are. recipe: torchao's name. emulate: round to float8, but multiply in fp32, on devices without float8.
    tensor_parallel: ranks that will share each layer. Raises ValueError if no layer is left.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_taken(module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and all(size % (16 * tensor_parallel) == 0 for size in module.weight.shape)

    blocks = list(blocks)
    if not any(is_taken(module, "") for block in blocks for module in block.modules()):
        none = "--fp8-format finds no linear layer outside of experts and adapters with sizes that 16 divides"
        raise ValueError(f"{none}: leave it out")
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=is_taken)


def describe_float8(blocks: nn.Module, recipe: str, emulate: bool) -> str:
    """Format how many linear layers of ``blocks`` compute in float8, and how."""
    from torchao.float8.float8_linear import Float8Linear

    layers = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    converted = sum(isinstance(layer, Float8Linear) for layer in layers)
    how = ", emulated, since this device has no float8: slower than bf16" if emulate else ""
    return f"{converted} of {len(layers)} linear layers in this rank's blocks multiply in float8, {recipe}{how}"
