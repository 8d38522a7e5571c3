"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen linear layers. Names of all other parameters stay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .transformer import Transformer


class LoraLinear(nn.Module):
    """A linear layer W and two adapters: x W^T + (x A^T) B^T alpha / rank. B begins at 0."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=linear.weight.device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


def add_adapters(model: Transformer, rank: int, alpha: float) -> None:
    """Freeze ``model`` and add adapters to the linear layers of its blocks."""
    model.requires_grad_(False)
    layers = {name: module for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in layers.items():
        model.layers.set_submodule(name, LoraLinear(linear, rank, alpha))


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))
