"""The parameters that islands last agreed on, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp.own_rank import local_part

from .config import IslandConfig


class AgreedParameters:
    """What this process holds of some parameters as all islands last agreed on them, in fp32.

    The outer optimizer is torch's SGD. Its gradient is the way from the islands' own parameters back to the agreed
    ones, the mean over islands.

    With ``offload`` these and the momentum wait in host memory, pinned where there is a GPU. The outer optimizer steps
    on the parameters' device all the same, of one after the other, so that its numbers are the same.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: IslandConfig) -> None:
        """parameters: a model's, of which the agreed ones are a copy."""
        self._offload, self._merge_alpha = config.offload, config.merge_alpha
        self._outer: dict[str, Any] = {
            "lr": config.outer_lr,
            "momentum": config.outer_momentum,
            "nesterov": config.outer_optimizer == "nesterov" and config.outer_momentum > 0,
        }
        self._devices = {name: held(parameter).device for name, parameter in parameters.items()}
        kinds = ("agreed", "momentum") if config.outer_momentum > 0 else ("agreed",)
        self._kept = {kind: {name: zeros_like(p, config.offload) for name, p in parameters.items()} for kind in kinds}
        self.values = {name: held(agreed) for name, agreed in self._kept["agreed"].items()}
        # From zeros the first step goes as from none.
        self._momentum = {name: held(momentum) for name, momentum in self._kept.get("momentum", {}).items()}
        self.begin_anew(parameters)

    def begin_anew(self, parameters: Mapping[str, Tensor]) -> None:
        """Agree on these, and forget what the outer optimizer knew."""
        for name, value in self.values.items():
            value.copy_(held(parameters[name]))
        for momentum in self._momentum.values():
            momentum.zero_()

    def differences(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The way back from an island's own parameters, fp32."""
        return [self._on_device(name, value) - held(parameters[name]) for name, value in self.values.items()]

    def step(self, mean_differences: Sequence[Tensor], on_mean: bool = False) -> None:
        """Move by the mean over all islands of their differences: as the outer optimizer has it, or just so far."""
        differences = dict(zip(self.values, mean_differences, strict=True))
        if on_mean:
            for name, value in self.values.items():
                value.sub_(differences[name].to(value.device))
            return
        for names in [[name] for name in self.values] if self._offload else [[*self.values]]:
            agreed = {name: self._on_device(name, self.values[name]) for name in names}
            momentum = {name: self._on_device(name, self._momentum[name]) for name in names if self._momentum}
            outer = torch.optim.SGD(agreed.values(), **self._outer)
            for name, value in agreed.items():
                value.grad = differences[name].to(value.device)
                if momentum:
                    outer.state[value]["momentum_buffer"] = momentum[name]
            outer.step()
            outer.zero_grad()
            for name in names if self._offload else ():
                self.values[name].copy_(agreed[name])
                if momentum:
                    self._momentum[name].copy_(momentum[name])

    def merge_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Move an island's own parameters to the agreed ones, but for what they keep of themselves."""
        alpha = self._merge_alpha
        for name, value in self.values.items():
            own, agreed = held(parameters[name]), self._on_device(name, value)
            # In this order without fused operations, whose rounding depends on where an element stands in memory.
            own.copy_(own * alpha + agreed * (1 - alpha) if alpha else agreed)

    def copy_to(self, parameters: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            held(parameters[name]).copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """ "agreed.NAME" and "momentum.NAME": DTensors where parameters are, in the memory that is in use."""
        return {f"{kind}.{name}": tensor for kind, named in self._kept.items() for name, tensor in named.items()}

    def _on_device(self, name: str, kept: Tensor) -> Tensor:
        """Where the parameter is; itself, if it waits there."""
        return kept.to(self._devices[name], non_blocking=True)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, a tied one once. Raises ValueError where there is none, or a complex one."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameter, so there is nothing that islands could agree on")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(
                f"the parameter {name} is complex, and islands agree on real numbers: make it a real one of its two "
                "parts, and torch.view_as_complex in the forward pass"
            )
    return parameters


def held(parameter: Tensor) -> Tensor:
    """``local_part``, out of autograd's sight."""
    return local_part(parameter.detach())


def zeros_like(parameter: Tensor, in_host_memory: bool) -> Tensor:
    """fp32, a DTensor where the parameter is one: of its device, or in host memory, pinned for copies to a GPU."""
    # Not DTensor.from_local, which would take what is in host memory back to the mesh's device.
    values = parameter.detach()
    if not in_host_memory:
        return torch.zeros_like(values, dtype=torch.float32)
    return torch.zeros_like(values, dtype=torch.float32, device="cpu", pin_memory=held(values).device.type == "cuda")
