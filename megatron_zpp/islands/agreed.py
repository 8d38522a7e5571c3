"""The parameters that islands last agreed on, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import IslandConfig


class AgreedParameters:
    """What this process holds of some parameters as all islands last agreed on them, in fp32.

    The outer optimizer is torch's SGD. Its gradient is the way from the islands' own parameters back to the agreed
    ones, the mean over islands.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: IslandConfig) -> None:
        """parameters: a model's, of which the agreed ones are a copy."""
        self._kinds = dict(parameters)
        self.values = {name: held(parameter).to(torch.float32, copy=True) for name, parameter in parameters.items()}
        self._merge_alpha = config.merge_alpha
        self._outer = torch.optim.SGD(
            self.values.values(),
            lr=config.outer_lr,
            momentum=config.outer_momentum,
            nesterov=config.outer_optimizer == "nesterov" and config.outer_momentum > 0,
        )

    def begin_anew(self, parameters: Mapping[str, Tensor]) -> None:
        """Agree on these, and forget what the outer optimizer knew."""
        for name, value in self.values.items():
            value.copy_(held(parameters[name]))
        self._outer.state.clear()

    def differences(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The way back from an island's own parameters, fp32."""
        return [value - held(parameters[name]) for name, value in self.values.items()]

    def step(self, mean_differences: Sequence[Tensor]) -> None:
        """Move by the mean over all islands of their differences."""
        for value, difference in zip(self.values.values(), mean_differences, strict=True):
            value.grad = difference.to(value.device)
        self._outer.step()
        self._outer.zero_grad()

    def merge_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Move an island's own parameters to the agreed ones, but for what they keep of themselves."""
        alpha = self._merge_alpha
        for name, value in self.values.items():
            own = held(parameters[name])
            # In this order without fused operations, whose rounding depends on where an element stands in memory.
            own.copy_(own * alpha + value * (1 - alpha) if alpha else value)

    def copy_to(self, parameters: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            held(parameters[name]).copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """ "agreed.NAME" and "momentum.NAME": of the kinds and shapes of the parameters, in the memory that is in use.

        Momentum before the first step is zeros, from which the step goes as from none.
        """
        tensors = {"agreed": self.values}
        if self._outer.defaults["momentum"] > 0:
            tensors["momentum"] = {name: self._momentum_of(value) for name, value in self.values.items()}
        return {
            f"{kind}.{name}": _as_kind_of(self._kinds[name], tensor)
            for kind, named in tensors.items()
            for name, tensor in named.items()
        }

    def _momentum_of(self, value: Tensor) -> Tensor:
        state = self._outer.state[value]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(value)
        return state["momentum_buffer"]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, a tied one once. Raises ValueError where there is none."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameter, so there is nothing that islands could agree on")
    return parameters


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory; any other tensor itself."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _as_kind_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """What this rank holds as a DTensor, if the parameter is one, in the same memory."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
