"""The MLPs of a block: two linear layers around an activation, or three with a gate."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # by the error function
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "squared_relu": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Activation:
    """An activation, and how a gate uses it (Shazeer, arXiv 2002.05202): f(gate) * (up + offset)."""

    name: str = "gelu_tanh"  # one of FUNCTIONS
    is_gated: bool = False
    offset: float = 0.0
    clamp: float | None = None  # gates are at most this, and ups at most this far from 0

    def __call__(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.name](x)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return FUNCTIONS[self.name](gate) * (up + self.offset if self.offset else up)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, ffn_size: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.linear_fc2 = nn.Linear(ffn_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


class GatedMLP(nn.Module):
    """SwiGLU and its relatives. Megatron's stacked ``linear_fc1`` is two layers here, so that a tensor-parallel rank
    has its rows of both."""

    def __init__(self, hidden_size: int, ffn_size: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.linear_fc1_gate = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.linear_fc1_up = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.linear_fc2 = nn.Linear(ffn_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation.gate(self.linear_fc1_gate(x), self.linear_fc1_up(x)))
