"""Muon under FSDP2: momentum orthogonalized as whole matrices, or as each node's block of their rows.

    zeropp = apply_zeropp(model, config)
    optimizer = Muon(
        [dict(params=hidden_matrices), dict(params=the_rest, use_muon=False)], zeropp, lr=1e-3, period=None
    )

The momentum of a matrix is a matrix, of which each rank has rows. torch.optim.Muon takes DTensors, and sends them over
all ranks for each of its products. Here rows are brought together once per step, as ``period`` says:

    1      whole matrices at every step: Muon as published;
    None   never: the rows of a node's ranks count as a matrix of their own, and nothing crosses nodes;
    k      whole matrices every k steps, blocks in between: MuonBP (arXiv 2510.16981), with nodes for devices. With
           ``stale_rows`` whole matrices in between, too, of a node's rows of now and of the others' of k steps ago.

``matrix_blocks.py`` has what is sent. What is done to a matrix is what torch.optim.Muon does.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import ParamsT, StateDict

from ..api import ZeroPP, local_part
from .matrix_blocks import SCALES, MatrixBlocks, MomentumWire, NewtonSchulz

_adamw_step = inspect.unwrap(torch.optim.AdamW.step)  # without hooks, which Muon's own step has


class Muon(torch.optim.AdamW):
    """Muon for matrices; groups of parameters with ``use_muon=False`` are AdamW's.

    Args:
        params: parameters, or groups of them, of ``zeropp``'s model. Muon's must be matrices.
        zeropp: what ``apply_zeropp`` returned for that model; its ``traffic`` counts what this sends.
        lr, weight_decay: of both, decoupled. betas, eps: AdamW's.
        momentum, nesterov, ns_coefficients, ns_steps: as torch.optim.Muon's; ``ns_eps`` is its ``eps``.
        adjust_lr_fn: one of ``SCALES``, by the shape of what is orthogonalized; extra_scale_factor multiplies that.
        period: whole matrices every `period` steps, the first included; None: blocks always.
        momentum_bits, momentum_block_size: in what rows cross nodes for whole matrices; None: in bf16, without a loss.
        stale_rows: with a period above 1; keeps what crossed nodes last.
    """

    def __init__(
        self,
        params: ParamsT,
        zeropp: ZeroPP,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        extra_scale_factor: float = 1.0,
        period: int | None = 1,
        momentum_bits: int | None = None,
        momentum_block_size: int = 128,
        stale_rows: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        adjust_lr_fn = adjust_lr_fn or "original"
        if adjust_lr_fn not in SCALES:
            raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} is not one of {', '.join(SCALES)}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        if period is not None and period < 1:
            raise ValueError(f"period must be at least 1, or None for blocks always; got {period}")
        if stale_rows and (period is None or period == 1):
            raise ValueError(f"stale_rows needs a period above 1, after which they are renewed; got {period}")
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
        self.zeropp, self.period, self.stale_rows = zeropp, period, stale_rows
        self._gathered: dict[tuple[int, ...], Any] = {}  # in the last whole step, by the matrices' ids
        self.momentum, self.nesterov = momentum, nesterov
        self.newton_schulz = NewtonSchulz(ns_steps, ns_coefficients, ns_eps, adjust_lr_fn, extra_scale_factor)
        self.wire = MomentumWire(momentum_bits, momentum_block_size)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # GradScaler would hand its scale to the fused AdamW, and leave the matrices' gradients scaled.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, device = self.param_groups[-1], self.zeropp.device
        for parameter in group["params"] if group.setdefault("use_muon", True) else ():
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon is for matrices, not for a parameter of shape {tuple(parameter.shape)}: put it in a group "
                    "with use_muon=False"
                )
            if parameter.device.type != device.type:
                raise ValueError(
                    f"Muon takes matrices on the device that computes, {device.type}: leave CPUOffloadPolicy out"
                )
            placements = parameter.placements if isinstance(parameter, DTensor) else (Shard(0),)
            if [placement for placement in placements if not placement.is_replicate()] != [Shard(0)]:
                raise ValueError(
                    f"Muon takes matrices whose rows are sharded, not placements {placements}: leave tensor "
                    "parallelism and shard_placement_fn out, or put it in a group with use_muon=False"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move matrices as Muon does, which is collective, and the rest as AdamW. Return what ``closure`` did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["use_muon"]:
                self._move_matrices(group)
        _adamw_step(self)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # AdamW's step asks for the parameters that it moves; matrices have moved by then.
        return False if group["use_muon"] else bool(super()._init_group(group, *lists))

    def _move_matrices(self, group: dict[str, Any]) -> None:
        matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
        whole = self._takes_whole(matrices)
        for blocks, batch in self.zeropp.matrix_blocks(matrices, self.wire):
            updates, shapes = [self._update_of(matrix) for matrix in batch], [matrix.shape for matrix in batch]
            gathered = blocks.gather(updates, shapes) if whole else self._stale_rows_of(blocks, batch)
            results = blocks.orthogonalized(updates, shapes, self.newton_schulz, gathered, is_stale=not whole)
            if whole and self.stale_rows and gathered is not None:
                self._gathered[tuple(map(id, batch))] = gathered
                for matrix, sent in zip(batch, gathered.own_rows(updates), strict=True):
                    local_part(self.state[matrix]["sent_rows"]).copy_(sent)
            rows = [local_part(matrix) for matrix in batch]
            torch._foreach_mul_(rows, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(rows, results, alpha=-group["lr"])

    def _stale_rows_of(self, blocks: MatrixBlocks, batch: list[Tensor]) -> Any:
        """Return what was gathered last, gathered again after a state was loaded; None: blocks alone."""
        if not self.stale_rows:
            return None
        key = tuple(map(id, batch))
        if key not in self._gathered:
            sent = [local_part(self.state[matrix]["sent_rows"]) for matrix in batch]
            self._gathered[key] = blocks.gather(sent, [matrix.shape for matrix in batch], MomentumWire())
        return self._gathered[key]

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        self._gathered.clear()

    def _update_of(self, matrix: Tensor) -> Tensor:
        """Move this rank's rows of the momentum by the gradient; return them, or with Nesterov the next step's."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        if self.stale_rows and "sent_rows" not in state:
            state["sent_rows"] = torch.zeros_like(matrix.grad, dtype=torch.bfloat16)  # as they were sent last
        gradient, momentum = local_part(matrix.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - self.momentum)
        state["step"] += 1
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

    def _takes_whole(self, matrices: list[Tensor]) -> bool:
        if self.period is None or self.period == 1 or not matrices:
            return self.period is not None
        return int(self.state[matrices[0]].get("step", 0)) % self.period == 0
