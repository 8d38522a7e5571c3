"""Pipeline parallelism by torch.distributed.pipelining: a rank's stages, and the schedule that runs micro-batches."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from megatron_zpp.models.transformer import ModelOutput, as_model_output
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.sharding import prepare_backward
from megatron_zpp.parallel.stages import Placement
from megatron_zpp.zeropp import ZeroPP
from megatron_zpp.zeropp.fsdp.topology import gather_node_names, gather_objects

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SPLITS_BACKWARD = ("zero-bubble", "zbv")  # gradients of inputs first, gradients of weights when there is time
_ONE_STAGE = ("gpipe", "1f1b")

Inputs = dict[str, Tensor]  # the model's arguments by name; each rank of a pipeline holds its own samples'


class Pipeline:
    """The stages of this rank, each an FSDP2 root, and the schedule that runs them."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        placement: Placement,
        mesh: Mesh,
        schedule: str,
        tokens: Tensor,
        hidden: Tensor,
        zero_stage: int,
        zeropp: ZeroPP,
        tied: str | None,
    ) -> None:
        """stages: by number. tokens, hidden: of a micro-batch, on the meta device. tied: see ``StageModules``."""
        self.stages, self.placement, self.schedule = stages, placement, schedule
        self.tokens, self.hidden = tokens, hidden
        self.zero_stage, self.zeropp = zero_stage, zeropp
        self.rank, self.group = mesh.pp_rank, mesh.pp.get_group()
        self._nodes = gather_node_names(self.group)  # where each pipeline rank runs
        self.last = placement.num_stages - 1
        self._built: Any = None  # the schedule for as many micro-batches as were run last
        self._loss: Callable[[Tensor, Any], Tensor] | None = None
        self._auxiliary: Callable[[ModelOutput, int], Tensor | float] | None = None
        self._forward_passes: Counter[nn.Module] = Counter()  # this step's passes, by stage
        self._names: list[str] | None = None  # names of the outputs beside hidden states or losses
        # The first and the last stage both have the tied weight; which the last one has is a copy, not to be counted.
        self._tied = f"{tied}.weight" if tied is not None and (0 in stages or self.last in stages) else None
        self.copies: list[nn.Parameter] = []
        if self._tied is not None and self.last in stages:
            self.copies = [stages[self.last].get_parameter(self._tied)]
        for stage in stages.values():
            stage.register_forward_hook(self._add_auxiliary_losses)

    def describe(self) -> str:
        """Describe the stages' layers and the schedule in one line."""
        layers = ", ".join(f"{layers[0]}-{layers[-1]}" for layers in self.placement.layers)
        return (
            f"pipeline of {self.placement.num_stages} stages on {self.group.size()} ranks, schedule {self.schedule}; "
            f"layers {layers}"
        )

    # Training

    def forward_backward(
        self,
        micro_batches: Sequence[tuple[Inputs, Any]],
        loss: Callable[[Tensor, Any], Tensor],
        auxiliary: Callable[[ModelOutput, int], Tensor | float],
    ) -> None:
        """Run one optimizer step's forward and backward passes; gradients are reduced at the end.

        ``micro_batches``: the model's inputs, and the target that ``loss`` takes beside the tokens' losses [B, S]; it
        returns what the last stage's backward pass begins with. ``auxiliary``: returns a stage's part of the loss, by
        its output and the micro-batch's number.
        """
        self._loss, self._auxiliary = loss, auxiliary
        self._forward_passes.clear()
        try:
            self._run_schedule(micro_batches)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # PipelineStage wraps what went wrong
        self._loss = self._auxiliary = None
        if self._tied is not None:
            self._add_up_tied_gradients(self._tied)
        # Each stage sends hidden states to the next one, and gradients of the same size to the one before.
        for number in self.stages:
            for neighbour in (number - 1, number + 1):
                if 0 <= neighbour <= self.last:
                    self._count(neighbour, len(micro_batches) * self.hidden.nbytes)

    def _resize(self, length: int) -> None:
        """Set the number of tokens that each sequence of a micro-batch has on this rank."""
        if length != self.tokens.shape[1]:
            batch, hidden_length, hidden_size = self.hidden.shape  # shorter than tokens with sequence parallelism
            hidden_length = length * hidden_length // self.tokens.shape[1]
            self.tokens = self.tokens.new_empty(batch, length)
            self.hidden = self.hidden.new_empty(batch, hidden_length, hidden_size).requires_grad_()
            self._built = None

    def _run_schedule(self, micro_batches: Sequence[tuple[Inputs, Any]]) -> None:
        self._resize(micro_batches[0][0]["tokens"].shape[1])
        if self._built is None or self._built._n_microbatches != len(micro_batches):
            stages = [self._stage(number, module) for number, module in self.stages.items()]
            self._built = SCHEDULES[self.schedule](
                stages[0] if self.schedule in _ONE_STAGE else stages,
                n_microbatches=len(micro_batches),
                loss_fn=lambda losses, target: self._loss(losses, target),  # type: ignore[misc]
                scale_grads=False,
            )
        for stage in [self._built._stage] if self.schedule in _ONE_STAGE else self._built._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        # All forward passes are of one step. If backward passes are split, gradients stay whole, and are reduced once.
        self.zeropp.set_is_last_micro_batch(len(micro_batches) == 1 or self.schedule in SPLITS_BACKWARD)
        # Not step(), which splits one batch into pieces: offsets of documents cannot be split.
        self._built._step_microbatches(
            [(inputs["tokens"],) if 0 in self.stages else () for inputs, _ in micro_batches],
            [{name: tensor for name, tensor in inputs.items() if name != "tokens"} for inputs, _ in micro_batches],
            [target for _, target in micro_batches],
            return_outputs=False,
        )

    def _add_auxiliary_losses(self, stage: nn.Module, inputs: Any, output: Tensor | ModelOutput) -> Tensor:
        """Return the hidden states for the next stage, with this stage's auxiliary losses in their backward pass."""
        output = as_model_output(output)
        if self._auxiliary is None or not torch.is_grad_enabled():  # an evaluation, or shapes that are tried
            return output.losses
        added = self._auxiliary(output, self._forward_passes[stage])  # a stage takes micro-batches in their order
        self._forward_passes[stage] += 1
        return AttachLoss.apply(output.losses, added) if isinstance(added, Tensor) else output.losses

    def names_of_all_stages(self, names: Sequence[str]) -> list[str]:
        """Merge the ranks' ``names`` of auxiliary losses and observations, the same in every step. Collective, once."""
        if self._names is None:
            names_per_rank = gather_objects(list(names), self.group)
            self._names = list(dict.fromkeys(name for names in names_per_rank for name in names))
        return self._names

    def _stage(self, number: int, module: nn.Module) -> PipelineStage:
        losses = torch.empty(self.tokens.shape, device="meta")
        arguments: Any = dict(
            stage_index=number,
            num_stages=self.placement.num_stages,
            device=self.zeropp.device,
            input_args=self.tokens if number == 0 else self.hidden,
            output_args=losses if number == self.last else self.hidden,
            group=self.group,
        )
        if self.schedule in SPLITS_BACKWARD:
            # FSDP2's hooks cannot tell when the weights' gradients are there: parameters and gradients stay whole
            # until the schedule ends, when PipelineStage calls FSDP2.
            return PipelineStage(module, **arguments)
        return _ShardedStage(module, self._prepare_backward, **arguments)

    def _prepare_backward(self, module: nn.Module, is_last: bool) -> None:
        prepare_backward(module, self.zero_stage, is_last)
        self.zeropp.set_is_last_micro_batch(is_last)

    def _add_up_tied_gradients(self, name: str) -> None:
        """Give the tied weight of the first and the last stage, one parameter, its whole gradient on both."""
        stage, other = (self.stages[0], self.last) if 0 in self.stages else (self.stages[self.last], 0)
        gradient = stage.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        local, peer = gradient.to_local(), self.placement.ranks[other]
        mine = local.to(self.zeropp.device)  # with --cpu-offload it is in host memory
        theirs = torch.empty_like(mine)
        # Not over a group of the two: making one would need all ranks of a NCCL world.
        exchange = [
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            wait_for_neighbour(work)
        local.add_(theirs.to(local.device))
        self._count(other, mine.nbytes)

    def _count(self, to_stage: int, nbytes: int) -> None:
        rank = self.placement.ranks[to_stage]
        if rank != self.rank:
            is_near = self._nodes[rank] == self._nodes[self.rank]
            self.zeropp.traffic.add(intra_node=nbytes * is_near, inter_node=nbytes * (not is_near))

    # Evaluation

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Inputs]) -> list[Tensor]:
        """Return each micro-batch's losses [B, S] of tokens on the rank of the last stage; elsewhere none."""
        self._resize(micro_batches[0]["tokens"].shape[1])
        ranks, outputs = self.placement.ranks, list[Tensor]()
        sends: list[tuple[dist.Work | None, Tensor]] = []
        for number, module in self.stages.items():
            inputs, arrivals = outputs, list[dist.Work | None]()
            if number == 0:
                inputs = [micro_batch["tokens"] for micro_batch in micro_batches]
            elif ranks[number - 1] != self.rank:
                inputs = [torch.empty_like(self.hidden, device=self.zeropp.device) for _ in micro_batches]
                arrivals = [dist.irecv(x, group=self.group, group_src=ranks[number - 1]) for x in inputs]
            outputs = []
            for i, micro_batch in enumerate(micro_batches):
                if arrivals:
                    wait_for_neighbour(arrivals[i])
                more = {name: tensor for name, tensor in micro_batch.items() if name != "tokens"}
                outputs.append(module(inputs[i], **more))
                if number < self.last and ranks[number + 1] != self.rank:
                    x = outputs[-1]
                    sends.append((dist.isend(x, group=self.group, group_dst=ranks[number + 1]), x))
        for send, _ in sends:
            wait_for_neighbour(send)
        return outputs if self.last in self.stages else []

    def train(self, mode: bool = True) -> None:
        """Call ``nn.Module.train`` of all stages."""
        for stage in self.stages.values():
            stage.train(mode)


class _ShardedStage(PipelineStage):
    """A stage whose FSDP2 units gather parameters and reduce gradients as they would without a pipeline."""

    def __init__(self, module: nn.Module, prepare: Callable[[nn.Module, bool], None], **arguments: Any) -> None:
        # Not the FSDP2 module itself, whose parameters and gradients PipelineStage would keep whole.
        super().__init__(_Call(module), **arguments)
        self.module, self.prepare = module, prepare

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        self.prepare(self.module, last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _Call(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.module(*args, **kwargs)


class AttachLoss(torch.autograd.Function):
    """Return ``x`` unchanged, and run the backward pass of the scalar ``loss`` with ``x``'s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()  # not a view, which PipelineStage cannot detach

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_ones((), dtype=torch.float32)


def sharding_stage(zero_stage: int, schedule: str | None) -> int:
    """Return the ZeRO stage under a schedule; None: no pipeline.

    If FSDP2's hooks cannot follow the backward pass, a step gathers parameters once and reduces gradients once.
    """
    return 1 if schedule in SPLITS_BACKWARD else zero_stage


def wait_for_neighbour(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def check_micro_batches(schedule: str, num_ranks: int, num_micro_batches: int) -> None:
    """Raise ValueError for a number of micro-batches that ``schedule`` cannot run on ``num_ranks`` pipeline ranks."""
    if schedule == "1f1b" and num_micro_batches < num_ranks:
        few = f"--pipeline-schedule 1f1b needs at least as many micro-batches as its {num_ranks} stages"
        raise ValueError(f"{few}; use a larger --global-batch-size, a smaller --micro-batch-size, or gpipe")
    rounds = max(1, num_micro_batches // num_ranks)
    if schedule in ("interleaved", "zero-bubble") and num_micro_batches % rounds:
        uneven = f"{num_micro_batches} micro-batches do not divide into {rounds} rounds of the schedule {schedule}"
        raise ValueError(f"{uneven}; use a --global-batch-size that makes a multiple of {num_ranks} micro-batches")
