"""The outer state of DiLoCo: the parameters that islands last synchronized, and the outer optimizer's momentum."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.zeropp.api import local_part

from .config import IslandConfig

MAX_VALUE = 1e20  # an island with a larger number has diverged


class OuterState:
    """This process's part of the outer parameters and the outer momentum, in fp32. All islands have the same.

    The outer optimizer is torch's SGD. Its gradient is the pseudo-gradient, the mean over islands of outer minus local
    parameters. With ``offload`` the state stays in host memory, pinned for a GPU, and one parameter at a time steps on
    the GPU, which gives the same numbers.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: IslandConfig) -> None:
        self._offload = config.offload
        self._sgd: dict[str, Any] = {
            "lr": config.outer_lr,
            "momentum": config.outer_momentum,
            "nesterov": config.outer_optimizer == "nesterov" and config.outer_momentum > 0,
        }
        self._devices = {name: local_data(parameter).device for name, parameter in parameters.items()}
        # "agreed" is a key of saved states, so its name stays.
        kinds = ("agreed", "momentum") if config.outer_momentum > 0 else ("agreed",)
        self._state = {kind: {name: self._zeros_like(p) for name, p in parameters.items()} for kind in kinds}
        self._parameters = {name: local_data(outer) for name, outer in self._state["agreed"].items()}
        # The first step from zero momentum equals a step without any.
        self._momentum = {name: local_data(momentum) for name, momentum in self._state.get("momentum", {}).items()}
        self.reset(parameters)

    def _zeros_like(self, parameter: Tensor) -> Tensor:
        """Return fp32 zeros, a DTensor if the parameter is one."""
        # Not DTensor.from_local, which moves tensors in host memory to the mesh's device.
        device, is_pinned = ("cpu", local_data(parameter).is_cuda) if self._offload else (None, False)
        return torch.zeros_like(parameter.detach(), dtype=torch.float32, device=device, pin_memory=is_pinned)

    def reset(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy ``parameters``, and set the momentum to zero."""
        for name, outer in self._parameters.items():
            outer.copy_(local_data(parameters[name]))
        for momentum in self._momentum.values():
            momentum.zero_()

    def differences(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return outer minus local parameters of an island, in fp32."""
        return [self._on_device(name, outer) - local_data(parameters[name]) for name, outer in self._parameters.items()]

    def step(self, mean_differences: Sequence[Tensor], on_mean: bool = False) -> None:
        """Apply the mean difference of all islands through the outer optimizer; ``on_mean``: become the mean itself."""
        for (name, stored), difference in zip(self._parameters.items(), mean_differences, strict=True):
            if on_mean:
                stored.sub_(difference.to(stored.device))
                continue
            outer = self._on_device(name, stored)
            outer.grad = difference.to(outer.device)
            optimizer = torch.optim.SGD([outer], **self._sgd)
            if self._momentum:
                momentum = self._on_device(name, self._momentum[name])
                optimizer.state[outer]["momentum_buffer"] = momentum
            optimizer.step()
            outer.grad = None
            if outer is not stored:
                stored.copy_(outer)
                if self._momentum:
                    self._momentum[name].copy_(momentum)

    def copy_to(self, parameters: Mapping[str, Tensor], alpha: float = 0.0) -> None:
        """Replace an island's parameters by the outer ones, but for the share ``alpha`` of its own."""
        for name, stored in self._parameters.items():
            local, outer = local_data(parameters[name]), self._on_device(name, stored)
            # In this order, without fused operations, whose rounding depends on the position in memory.
            local.copy_(local * alpha + outer * (1 - alpha) if alpha else outer)

    def state_dict(self) -> dict[str, Tensor]:
        """ "agreed.NAME" and "momentum.NAME": the tensors in use, DTensors where parameters are."""
        return {f"{kind}.{name}": tensor for kind, named in self._state.items() for name, tensor in named.items()}

    def _on_device(self, name: str, stored: Tensor) -> Tensor:
        """Return the tensor on its parameter's device; itself if it is there."""
        return stored.to(self._devices[name], non_blocking=True)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return them by name, a tied one once. Raises ValueError if there are none, or if one is complex."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameter, so islands have nothing to synchronize")
    if name := next((name for name, parameter in parameters.items() if parameter.is_complex()), None):
        raise ValueError(f"the parameter {name} is complex: make it real, and use torch.view_as_complex")
    return parameters


def are_sound(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors hold neither NaN nor Inf nor numbers beyond ``MAX_VALUE``. The host waits for a GPU."""
    parts = [part for part in tensors if part.numel()]  # a rank's shard may be empty
    return not parts or bool((torch.stack(torch._foreach_norm(parts, torch.inf)) <= MAX_VALUE).all())


def local_data(parameter: Tensor) -> Tensor:
    """Return ``local_part`` without autograd."""
    return local_part(parameter.detach())
