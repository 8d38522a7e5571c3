"""Find where NaN or Inf began: compute the step again, and check every module's output and gradient."""

import math
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.models.transformer import ModelOutput
from megatron_zpp.optim.gradients import LEAST_LOSS_SCALE
from megatron_zpp.parallel.distributed import gather_if_any, print_once
from megatron_zpp.training.step import accumulate_gradients
from megatron_zpp.training.trainer import StepStats, Trainer
from megatron_zpp.zeropp.api import local_part
from megatron_zpp.zeropp.fsdp.topology import gather_objects

SHOWN = 3  # findings in one line
_OUTPUT, _GRADIENT, _SUM = range(3)  # kinds of findings: one explains those after it


class NotFiniteError(ValueError):
    """NaN or Inf in too many steps in a row, in the parameters, or in the last evaluation."""


class NonfiniteSteps:
    """Counts the steps that were skipped for NaN or Inf, and reports where that began. Collective on a step's ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, training = trainer, trainer.settings.training
        # fp16's first loss scale, 2^32, may take 30 halvings to come down.
        self.limit = training.max_nonfinite_steps or (50 if trainer.scaler.is_dynamic else 10)
        self.is_checked = not training.no_check_for_nan_in_loss_and_grad
        self.steps = self.in_a_row = 0  # steps of this process; the last consecutive non-finite ones
        self.last: StepStats | None = None
        self.where = self.sums = ""
        self.too_many: str | None = None  # why the run ends

    def check(self, stats: StepStats) -> bool:
        """Count a step, and compute one with NaN or Inf again to find its place; return whether the run must end."""
        self.steps, self.last = self.steps + 1, stats
        self.in_a_row = self.in_a_row + 1 if stats.is_nonfinite else 0
        if stats.is_nonfinite:
            self.sums = _sums(self.trainer.model)
        if not stats.is_nonfinite or not self.is_checked:
            return self.too_many is not None
        iteration, scaler = self.trainer.counters.iteration, self.trainer.scaler
        if self.in_a_row == (self.limit if scaler.is_dynamic else 1):
            self.where = locate_nonfinite(self.trainer, stats)
            if dist.get_rank(self.trainer.mesh.step_group) == 0:
                print(
                    f"note: NaN or Inf at iteration {iteration} (loss {stats.loss:g}, gradient norm "
                    f"{stats.grad_norm:g}), the step was skipped: {self.where}",
                    flush=True,
                )
        if self.in_a_row >= self.limit:
            self.too_many = (
                f"{self.in_a_row} steps in a row, up to iteration {iteration}, had NaN or Inf (loss scale "
                f"{scaler.scale:g}), so the parameters did not move: {self.where}; lower --lr or look at the data, or "
                "go on with --no-check-for-nan-in-loss-and-grad"
            )
        return self.too_many is not None

    def problem_at_end(self) -> str | None:
        """Return why the run fails, also after its last step; None if it does not. Collective over all ranks."""
        return next(filter(None, gather_if_any(self.too_many or self._at_end())), None)

    def _at_end(self) -> str | None:
        """Say that there was no finite step, or that NaN or Inf is in a parameter that the last step moved."""
        trainer, last = self.trainer, self.last
        assert last is not None
        iteration = trainer.counters.iteration
        if self.in_a_row < self.steps:
            name = next(filter(None, gather_if_any(nonfinite_tensor(trainer.model), trainer.mesh.step_group)), None)
            if name is None:
                return None
            return (
                f"NaN or Inf is in {name} after iteration {iteration}: lower --lr, and go on from an older checkpoint "
                "with --ckpt-step"
            )
        scale = trainer.scaler.scale
        if trainer.scaler.is_dynamic and math.isfinite(last.loss) and LEAST_LOSS_SCALE < scale < math.inf:
            # Overflows are no end: the scale comes down, as it would in a longer run.
            if trainer.counters.scheduled_samples == 0 and iteration == trainer.train_iters:
                print_once(
                    f"note: no step counted, and the parameters are the initial ones: the loss scale is still coming "
                    f"down, and is {scale:g} by now; train longer, or begin with --initial-loss-scale {scale:g}"
                )
            return None
        where = self.where
        if not where and any(gather_objects(_sums(trainer.model) != self.sums, trainer.mesh.step_group)):
            where = "the parameters were replaced after the last step, so it cannot be computed again"
        where = where or locate_nonfinite(trainer, last)
        return (
            f"not one of the {self.steps} steps up to iteration {iteration} was without NaN or Inf (loss scale "
            f"{scale:g}), so the parameters did not move: {where}; lower --lr or look at the data"
        )


def _sums(model: nn.Module) -> str:
    """Return a text that differs when this rank's parameters were replaced; a NaN in them is the same again."""
    return str(torch.stack([local_part(parameter).detach().float().sum() for parameter in model.parameters()]).tolist())


def nonfinite_tensor(model: nn.Module) -> str | None:
    """Name the first parameter or buffer of which this rank holds a NaN or Inf, and this rank; None without any."""
    for name, parameter in model.named_parameters():
        if not local_part(parameter).isfinite().all():
            return f"the parameter {name} (the part of {_this_rank()})"
    for name, buffer in model.named_buffers():
        if local_part(buffer).isnan().any():  # a mask may hold Inf
            return f"the buffer {name} of {_this_rank()}"
    return None


def nonfinite_anywhere(trainer: Trainer) -> str | None:
    """Name a NaN or Inf in the model, on any rank; None without any. Collective over all ranks."""
    return next(filter(None, gather_if_any(nonfinite_tensor(trainer.model))), None)


def _this_rank() -> str:
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def locate_nonfinite(trainer: Trainer, stats: StepStats) -> str:
    """Compute a step with NaN or Inf again, and say where it began, on which rank. Changes nothing. Collective."""
    tensor = nonfinite_tensor(trainer.model)
    stages: Mapping[int, nn.Module] = {0: trainer.model}
    last_stage = 0
    if trainer.pipeline is not None:
        stages, last_stage = trainer.pipeline.stages, trainer.pipeline.last
    with (
        _watch(stages, last_stage, compiled=trainer.settings.activation.compile) as found,
        torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []),
    ):
        scale = trainer.scaler.scale
        trainer.scaler.scale = stats.loss_scale  # the overflow may have lowered it
        accumulate_gradients(trainer, iter(stats.micro_batches), len(stats.micro_batches))
        trainer.scaler.scale = scale
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None and not local_part(parameter.grad).isfinite().all():
            found.setdefault((_SUM, 0), (0, f"the gradient of the parameter {name}, as the sum over samples and ranks"))
    trainer.optimizer.zero_grad()
    trainer.model.finish_step(has_stepped=False, add_up=lambda tensor: None)  # experts forget its tokens
    trainer.token_traffic.take()  # do not count it
    if trainer.zeropp is not None:
        trainer.zeropp.undo_step()
        trainer.zeropp.traffic.take()
    events = [((*place, call), text) for place, (call, text) in found.items()]
    per_rank = gather_objects((tensor, events), trainer.mesh.step_group)

    # A parameter explains all, an output what comes after it, and a gradient of an output sums of gradients. Ranks of
    # a stage call the same modules in turn, and may send each other what they compute: where it came first, it began.
    causes = [text for text, _ in per_rank if text is not None]
    events = [event for _, of_rank in per_rank for event in of_rank]
    if events and not causes:
        first, _ = min(events)
        causes = [*dict.fromkeys(text for when, text in events if when == first)]
    if not causes:
        return (
            "computed again, the step is finite: a fault that passed (dropout's draw, gradients whose norm is beyond "
            "fp32, or hardware)"
        )
    more = f", and {len(causes) - SHOWN} more" if len(causes) > SHOWN else ""
    return f"it began in {'; '.join(causes[:SHOWN])}{more}"


@contextmanager
def _watch(
    stages: Mapping[int, nn.Module], last_stage: int, compiled: bool
) -> Iterator[dict[tuple[int, int], tuple[int, str]]]:
    """Find what is first not finite in each stage's forward pass and backward pass, and at which call of a hook.

    Yields it by kind and the stage's turn: outputs go from stage to stage of a pipeline, and gradients back.
    """
    found: dict[tuple[int, int], tuple[int, str]] = {}
    calls: Counter[tuple[int, int]] = Counter()
    handles = []

    def note(kind: int, stage: int, name: str, tensor: Any) -> None:
        place = kind, -stage if kind == _GRADIENT else stage
        calls[place] += 1
        is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if place not in found and is_float and not local_part(tensor.detach()).isfinite().all():
            found[place] = calls[place], f"{name} on {_this_rank()}"

    def after_forward(stage: int, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if module is not stages[stage]:  # computed by what encloses the module, as attention is
                note(_OUTPUT, stage, f"the input of {name}", inputs[0] if inputs else None)
            if isinstance(output, ModelOutput):
                for loss, value in output.auxiliary.items():
                    note(_OUTPUT, stage, f"the auxiliary loss {loss}", value)
                output = output.losses
            note(_OUTPUT, stage, f"the output of {name}", output)
            if isinstance(output, Tensor) and output.requires_grad:
                reached = f"the gradient that reached the output of {name}"
                output.register_hook(lambda gradient: note(_GRADIENT, stage, reached, gradient))

        return hook

    for stage, model in stages.items():
        for name, module in model.named_modules():
            is_leaf, is_child = not any(True for _ in module.children()), name.count(".") <= 1
            # Compiled blocks do not call hooks inside.
            if name and (is_child if compiled else is_leaf):
                handles.append(module.register_forward_hook(after_forward(stage, name)))
        last = "the loss" if stage == last_stage else "the last layer"
        handles.append(model.register_forward_hook(after_forward(stage, last)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
