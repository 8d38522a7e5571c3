"""The gradient reduce-scatter of ZeRO++ (qgZ), which crosses nodes once per optimizer step, with LoCo.

FSDP2 hands over the flat gradients [N, P, L] of one unit, rank by rank, and wants this rank's reduced shard [L].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from .collectives import TorchAllocator
from .config import ZeroPPConfig
from .fsdp_unit import FSDPUnit
from .loco import ErrorFeedback
from .monitor import ErrorMonitor
from .quantization import mix_seed
from .topology import Topology
from .traffic import Traffic
from .wire_format import ParameterShard, WireFormat, wire_format


@dataclass
class MicroBatch:
    """Where the training loop is, shared by all units."""

    is_last: bool = True


class HierarchicalReduceScatter(TorchAllocator, ReduceScatter):
    """qgZ (ZeRO++ section 3.3) in two hops, both accumulated in fp32.

    Each micro-batch, an all-to-all within the node adds up the node's gradients for the N shards with this rank's
    place p, [N, L]. They stay here until the last micro-batch of the optimizer step, when an all-to-all between the
    nodes adds them up to [L]; earlier micro-batches return zeros, which FSDP2 adds to ``.grad``.
    """

    def __init__(
        self,
        unit: FSDPUnit,
        topology: Topology,
        config: ZeroPPConfig,
        traffic: Traffic,
        monitor: ErrorMonitor,
        micro_batch: MicroBatch,
    ) -> None:
        self.unit, self.topology, self.config = unit, topology, config
        self.traffic, self.monitor, self.micro_batch = traffic, monitor, micro_batch
        self.node_sum: Tensor | None = None  # fp32 [N, L], of the micro-batches so far
        self.begun_at = 0  # the unit's optimizer steps when this one's first micro-batch came
        self.steps = 0  # reductions between nodes so far
        self.micro_batches = 0  # of this step, so far
        self.feedback: dict[str, ErrorFeedback] = {}  # by hop
        if config.loco is not None and topology.num_nodes > 1:
            self.feedback["inter"] = ErrorFeedback(config.loco)
        if config.loco is not None and config.loco.hops == "both" and topology.ranks_per_node > 1:
            self.feedback["intra"] = ErrorFeedback(config.loco)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        parameters = self._reduced_parameters(output_tensor.numel())
        intra = self._format(parameters, self.config.gradient_intra_bits, input_tensor.dtype)
        inter = self._format(parameters, self.config.gradient_bits, input_tensor.dtype)

        if self.node_sum is None:
            self.begun_at = self.unit.optimizer_steps
        elif self.begun_at != self.unit.optimizer_steps:
            raise RuntimeError(
                f"an optimizer step was taken while {self.unit.label} held gradients that had not crossed nodes: say "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )

        gradients = input_tensor.view(num_nodes, ranks_per_node, output_tensor.numel())
        if self.config.hadamard:
            # Sums of rotated gradients are rotated sums: rotate once before both hops and back once after them.
            rotation = inter if inter.quantized else intra
            gradients = rotation.rotate(gradients)
        summands, source = self._exchange_within_node(gradients, intra)
        if not self.micro_batch.is_last:
            self.node_sum = self._add_to_node_sum(summands, source)
            self.micro_batches += 1
            output_tensor.zero_()
            return None

        total = self._reduce_between_nodes(summands, source, inter)
        if self.config.hadamard:
            total = rotation.rotate(total)
        output_tensor.copy_(scaled_as(op, total, group.size()))
        self.node_sum, self.micro_batches = None, 0
        self.steps += 1
        self.unit.mark_reduced()
        return None

    def _exchange_within_node(self, gradients: Tensor, intra: WireFormat) -> tuple[Tensor, WireFormat | None]:
        """Intra-node hop of [N, P, L]: what adds up to the node's gradients for the N shards with this rank's p.

        They are what P ranks sent, uint8 [P, N, nbytes] in the format that is returned with them, or [N, L] and None.
        """
        if self.topology.ranks_per_node == 1:
            return gradients.squeeze(1), None
        # [P, N, L]: P pieces, one for each peer
        wires = self._encode("intra", gradients.transpose(0, 1), intra)
        received = all_to_all(wires, self.topology.intra_group)
        self.traffic.add(intra_node=received.nbytes - received[0].nbytes)
        return received, intra

    def _add_to_node_sum(self, summands: Tensor, source: WireFormat | None) -> Tensor:
        """The node's sum of the micro-batches so far: fp32 [N, L]."""
        if source is None:
            return summands.to(torch.float32, copy=True) if self.node_sum is None else self.node_sum.add_(summands)
        if self.node_sum is not None:
            return source.decode_sum(summands, out=self.node_sum, accumulate=True)
        shape = (self.topology.num_nodes, source.numel)
        return source.decode_sum(summands, out=torch.empty(shape, device=summands.device))

    def _reduce_between_nodes(self, summands: Tensor, source: WireFormat | None, inter: WireFormat) -> Tensor:
        """Inter-node hop: the N nodes' sums fp32 [N, L] into this rank's total fp32 [L]."""
        # One pass adds up the node's gradients and encodes the sum, unless the sum itself is wanted.
        same_blocks = source is None or source.bits is None or inter.bits is not None
        if self.topology.num_nodes > 1 and same_blocks and not self.monitor.is_due(self.steps):
            wires = self._encode("inter", summands, inter, source=source, plus=self.node_sum)
        else:
            node_sum = self._add_to_node_sum(summands, source)
            if self.topology.num_nodes == 1:
                return node_sum.squeeze(0)
            wires = self._encode("inter", node_sum, inter)
        received = all_to_all(wires, self.topology.inter_group)  # [N nodes, nbytes]
        self.traffic.add(inter_node=received.nbytes - received[0].nbytes)
        return inter.decode_sum(received, out=torch.empty(inter.numel, device=received.device))

    def _encode(self, hop: str, pieces: Tensor, format: WireFormat, **source: Any) -> Tensor:
        """Encode what is sent over a hop, one piece for each of its G ranks, with LoCo: uint8 [G, ..., nbytes]."""
        noise_seed = None
        if self.config.gradient_rounding == "stochastic":
            place = (hop, self.unit.name, self.topology.rank, self.steps, self.micro_batches)
            noise_seed = mix_seed(self.config.seed, "gradients", *place)
        if hop in self.feedback:
            # The hop between nodes runs once per step, that within a node once per micro-batch.
            is_first = hop == "inter" or self.micro_batches == 0
            is_last = self.micro_batch.is_last
            wires = self.feedback[hop].encode(pieces, format, noise_seed, is_first, is_last, **source)
        else:
            wires = format.encode(pieces, noise_seed, **source)
        if self.monitor.is_due(self.steps):
            arrived = format.decode(wires, out=torch.empty_like(pieces, dtype=torch.float32))
            self.monitor.record(f"gradients/{hop}", self.unit.name, pieces, arrived)
        return wires

    def _format(self, parameters: tuple[ParameterShard, ...], bits: int | None, dtype: torch.dtype) -> WireFormat:
        return wire_format(parameters, bits, self.config.gradient_block_size, dtype)

    def _reduced_parameters(self, shard_numel: int) -> tuple[ParameterShard, ...]:
        parameters = self.unit.parameter_shards(trainable_only=True)
        if sum(parameter.numel for parameter in parameters) != shard_numel:
            raise RuntimeError(
                f"some trainable parameters of {self.unit.label} got no gradient in this backward pass; FSDP2 then "
                "leaves them out and quantized gradients cannot tell which. Freeze them (requires_grad = False), or "
                "call model.set_reduce_scatter_unused_params(True), which newer torch releases have"
            )
        return parameters

    def undo_step(self) -> None:
        """The gradients since the last optimizer step are thrown away."""
        self.node_sum, self.micro_batches = None, 0
        if self.begun_at == self.unit.optimizer_steps:  # no optimizer has used what the errors went with
            for feedback in self.feedback.values():
                feedback.undo_step()

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"{hop}.{k}": v for hop, feedback in self.feedback.items() for k, v in feedback.state_dict().items()}
        if self.config.gradient_rounding == "stochastic":
            state["steps"] = torch.tensor(self.steps)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.node_sum, self.micro_batches = None, 0
        if "steps" in state:
            self.steps = int(state["steps"])
        for hop, feedback in self.feedback.items():
            prefix = f"{hop}."
            own = {k.removeprefix(prefix): v.to(self.unit.device) for k, v in state.items() if k.startswith(prefix)}
            feedback.load_state_dict(own)


def all_to_all(wires: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send wires[g] to the group's rank g: what each of the G ranks sent here, uint8 [G, ...]."""
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires, group=group)
    return received


def scaled_as(op: Any, total: Tensor, world_size: int) -> Tensor:
    """Scale the sum over all ranks as FSDP2's reduce operation asks: AVG, SUM or PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return total / total.new_full((), world_size)  # by a tensor: see quantize_blocks
    if op == dist.ReduceOp.SUM:
        return total
    kind, factor = op.__getstate__()  # the only way to read a PREMUL_SUM's factor
    if kind != dist.ReduceOp.PREMUL_SUM:
        raise ValueError(f"gradients cannot be reduced by {op}; ZeRO++ supports AVG, SUM and PREMUL_SUM")
    return total * factor
