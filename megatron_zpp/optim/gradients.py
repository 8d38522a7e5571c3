"""Scale, clip and count the gradients of a step over all ranks, with the same result to the bit on each.

Each rank measures the shards that it counts, in fp64, so that in practice neither the number of threads nor of shards
shows in a norm that is rounded to fp32; the ranks' results are gathered and added in rank order. One rank counts each
element that several ranks hold (``counted_shard``).

What is measured of gradients stays on their device: a step looks at all of it at once, when everything is queued.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_zpp.settings.groups import PrecisionSettings
from megatron_zpp.zeropp.api import local_part
from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.fsdp.topology import process_rank

# Elements squared at once: on a CPU torch makes an fp64 copy of them, which must stay in a cache.
PIECE = 2**20


def clip_gradients(
    parameters: Sequence[Tensor], max_norm: float, squares: Tensor, factor: float | Tensor = 1.0
) -> Tensor:
    """Multiply gradients by ``factor``, and so that their global L2 norm is then at most ``max_norm``; 0 = any.

    squares: ``sum_of_squares`` over all ranks. Returns the norm before clipping, an fp32 scalar. It is Inf or NaN if
    any gradient is; the gradients are then not clipped, and the caller must not step.
    """
    norm = (squares.sqrt() * factor).float()
    if max_norm > 0:
        # As torch.nn.utils.clip_grad_norm_.
        factor = factor * (max_norm / (torch.where(norm.isfinite(), norm, 0.0) + 1e-6)).clamp(max=1.0)
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # offloaded gradients are in host memory
    elif gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return norm


def params_norm(
    parameters: Sequence[Tensor], copies: Sequence[Tensor] = (), group: dist.ProcessGroup | None = None
) -> float:
    """Return the global L2 norm of the parameters, fp32; arguments as in ``sum_over_all_ranks``. Collective."""
    (squares,) = sum_over_all_ranks([sum_of_squares], parameters, copies, of_gradients=False, group=group)
    return squares.sqrt().float().item()


def sum_over_all_ranks(
    measures: Sequence[Callable[[Sequence[Tensor]], Tensor]],
    parameters: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    of_gradients: bool = True,
    totals: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum M ``measures`` of the shards that each rank counts, of gradients or parameters, over all ranks: fp64 [M + K].

    Gathers each rank's numbers and adds them, so that all ranks get the same bits.
    copies: parameters that another rank has too, and counts. totals: this rank's numbers [K], which are summed too: all
    that a step must know goes through one collective. group: the ranks to sum over; default all.
    """
    left_out = {id(parameter) for parameter in copies}
    tensors = [p.grad if of_gradients else p.detach() for p in parameters if id(p) not in left_out]
    shards = [counted_shard(tensor) for tensor in tensors if tensor is not None]
    # Numbers are gathered on the GPU for NCCL, as parameters may be in host memory; else where the parameters are.
    device = parameters[0].device if parameters else torch.device("cpu")
    if dist.is_initialized() and dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    num_totals = 0 if totals is None else len(totals)
    local = torch.zeros(len(measures) + num_totals, dtype=torch.float64, device=device)
    if shards := [shard for shard in shards if shard.numel() > 0]:
        for m, measure in enumerate(measures):
            local[m] = measure(shards)
    if totals is not None:
        local[len(measures) :] = totals
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return local
    gathered = local.new_empty(dist.get_world_size(group), len(local))
    all_gather(gathered.flatten(), local, group=group)
    return gathered.t().contiguous().sum(dim=1)


def counted_shard(tensor: Tensor) -> Tensor:
    """Return the part of a parameter, or of its gradient, that this rank counts: its shard, or nothing.

    Each element is in the shard of exactly one rank, the first that holds it. Raises ValueError for a DTensor that is a
    partial sum.
    """
    if not isinstance(tensor, DTensor):
        # Rank 0 counts what every rank holds whole. So under a pipeline parameters must be DTensors: rank 0 would not
        # count a plain tensor of a stage that it does not run.
        return tensor if process_rank() == 0 else tensor.new_empty(0)
    if any([placement.is_partial() for placement in tensor.placements]):
        raise ValueError(f"a tensor of placements {tensor.placements} is not summed yet: it has no shards")
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # a rank holds no tensors of meshes without it
    local = tensor.to_local()
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and index > 0:
            return local.new_empty(0)  # the first replica counts
    return local


def sum_of_squares(shards: Sequence[Tensor]) -> Tensor:
    """Sum the squares of all elements in fp64."""
    pieces = [piece for shard in shards for piece in shard.reshape(-1).split(PIECE)]
    return torch.stack(torch._foreach_norm(pieces, 2.0, torch.float64)).square().sum()


def count_zeros(shards: Sequence[Tensor]) -> Tensor:
    """Count the elements that are zero."""
    return torch.stack([(shard == 0).sum() for shard in shards]).sum()


LEAST_LOSS_SCALE = 1.0


class LossScaler:
    """The loss scale by Megatron's rules: dynamic for ``--fp16``, fixed with ``--loss-scale``; 1 for bf16 and fp32.

    The dynamic scale doubles after ``loss_scale_window`` clean steps in a row. Each overflow uses up one of
    ``hysteresis`` tolerated ones; when they are used up, this and every further overflow halves the scale, down to
    1. Tolerance comes back only when the scale grows.
    """

    def __init__(self, precision: PrecisionSettings) -> None:
        self.is_dynamic = precision.fp16 and precision.loss_scale is None
        self.scale = float(precision.loss_scale or 1.0) if precision.fp16 else 1.0
        if self.is_dynamic:
            self.scale = float(precision.initial_loss_scale)
        self._precision, self._clean_steps, self._tolerance = precision, 0, precision.hysteresis

    def update(self, overflow: bool) -> None:
        """Call once per step; ``overflow``: a gradient was Inf or NaN, on any rank (all ranks must agree)."""
        if not self.is_dynamic:
            return
        self._clean_steps = 0 if overflow else self._clean_steps + 1
        if overflow:
            self._tolerance -= 1
            if self._tolerance <= 0:
                self.scale = max(self.scale / 2, LEAST_LOSS_SCALE)
        elif self._clean_steps == self._precision.loss_scale_window:
            self._clean_steps, self._tolerance = 0, self._precision.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must keep so that a resumed run scales the same."""
        return dict(scale=self.scale, clean_steps=self._clean_steps, tolerance=self._tolerance)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state_dict``. A fixed scale stays what the settings say."""
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self._clean_steps, self._tolerance = int(state["clean_steps"]), int(state["tolerance"])
