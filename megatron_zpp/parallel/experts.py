"""Expert parallelism: a rank has some of a layer's experts, and tokens are sent to them and back.

Experts are divided twice. Tensor-parallel ranks have the same tokens: each takes those that chose its experts, and the
experts' outputs are gathered. Expert-parallel ranks have different tokens, which an all-to-all sends to the ranks of
their experts, and another one back (GShard, arXiv 2006.16668, section 3).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from megatron_zpp.models.moe import Experts, MoE, run_experts
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.parallel.tensor import ShardedRows
from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.topology import gather_node_names
from megatron_zpp.zeropp.fsdp.waits import current_stream
from megatron_zpp.zeropp.wire.format import WireFormat, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

TOKEN_BLOCK = 128  # elements of a token that share a scale, where tokens are sent in few bits


def apply_expert_parallelism(
    model: nn.Module, mesh: Mesh, ranks_per_node: int | None, token_bits: int | None, traffic: Traffic
) -> None:
    """Divide the experts of ``model``, built on the meta device, in place; before it is sharded. Collective.

    ranks_per_node: of ``Mesh.fsdp``; None: as the ranks run. token_bits: per element sent; None: as computed.
    traffic: counts what leaves a rank for its tokens.
    """
    exchange = TokenExchange(mesh, ranks_per_node, token_bits, traffic)
    # The ranks among which a layer's experts are divided: by the tensor-parallel rank first.
    divided = mesh.tp if mesh.ep_size == 1 else mesh.ep
    if mesh.ep_size > 1 and mesh.tp_size > 1:
        divided = DeviceMesh._concatenate([mesh.tp, mesh.ep])
    for module in model.modules():
        if isinstance(module, MoE):
            ShardedRows()._apply(module.experts, divided)
            module.run_experts = exchange  # type: ignore[assignment]


def token_format(hidden_size: int, bits: int | None, dtype: torch.dtype) -> WireFormat:
    """Return the wire format of one token's row; bits None sends it as it is."""
    row = (ParameterShard("token", numel=hidden_size, quantizable=True),)
    return wire_format(row, bits, TOKEN_BLOCK, dtype)


class TokenExchange:
    """``models.moe.run_experts`` where a rank has one of tp * ep parts of the experts.

    Expert (t * ep + e) * E / (tp * ep) + i is the one with number i of tensor-parallel rank t and expert-parallel rank
    e. The host waits for the device once a layer and pass, to know how many tokens come, and has queued work by then.
    With a capacity it waits for nothing, if expert-parallel ranks are on one node: each expert's rows are padded to it.
    """

    def __init__(self, mesh: Mesh, ranks_per_node: int | None, token_bits: int | None, traffic: Traffic) -> None:
        self.token_bits, self.traffic = token_bits, traffic
        self.tp_size, self.tp_rank, self.ep_size = mesh.tp_size, mesh.tp_rank, mesh.ep_size
        self.tp_group = mesh.tp.get_group()
        self.ep_group = mesh.ep.get_group() if mesh.ep_size > 1 else None
        self._is_near = _ranks_on_this_node(mesh, ranks_per_node) if mesh.ep_size > 1 else []

    def __call__(self, experts: Experts, counts: Tensor, capacity: int | None = None) -> Callable[[Tensor], Tensor]:
        """Exchange ``counts``, int64 [E], of all experts; return what sends rows [R, H], sorted by expert -> [R, H].

        Rows beyond the sum of ``counts`` are not sent: they come back as zeros. capacity: the most of an expert's rows,
        equal on all ranks.
        """
        if capacity is not None and all(self._is_near):
            return lambda rows: self._run_padded(experts, rows, counts, capacity)
        # A selective checkpoint expects the operators of the forward pass again, and FSDP's hooks around experts, which
        # are a unit of their own, run others then: so it does not see them, and experts are computed again whole.
        with _disable_current_modes():
            counts = counts.view(self.tp_size, self.ep_size, -1)  # [tp, ep, experts of a rank]
            mine = arriving = counts[self.tp_rank]  # [ep, experts of a rank]: what this rank sends, and what comes
            if self.ep_group is not None:
                arriving = torch.empty_like(mine)
                dist.all_to_all_single(arriving, mine.contiguous(), group=self.ep_group)
            read_sizes = start_reading(torch.cat([counts.sum((1, 2)), mine.sum(1), arriving.sum(1)]))

        def run(rows: Tensor) -> Tensor:
            with _disable_current_modes():
                return self._run(experts, rows, arriving, read_sizes())

        return run

    def _run_padded(self, experts: Experts, rows: Tensor, counts: Tensor, capacity: int) -> Tensor:
        """Run ``experts`` on ``capacity`` rows each, those that are missing as zeros (GShard, section 3.2)."""
        with _disable_current_modes():  # as in __call__
            num_rows = capacity * counts.numel()
            stops = counts.cumsum(0)
            row = torch.arange(rows.size(0), device=rows.device)
            expert = torch.bucketize(row, stops, right=True)  # E for a row that no expert has
            place = (expert * capacity + row - nn.functional.pad(stops, (1, 0))[expert]).clamp(max=num_rows)
            padded = rows.new_zeros(num_rows + 1, rows.size(1)).index_copy(0, place, rows)[:-1]
            arriving = counts.new_full((self.ep_size, counts.numel() // (self.tp_size * self.ep_size)), capacity)
            sizes = [num_rows // self.tp_size] * self.tp_size + [arriving[0].numel() * capacity] * (2 * self.ep_size)
            out = self._run(experts, padded, arriving, sizes)
            return nn.functional.pad(out, (0, 0, 0, 1)).index_select(0, place)

    def _run(self, experts: Experts, rows: Tensor, arriving: Tensor, sizes: list[int]) -> Tensor:
        tp_rows, sent, received = sizes[: self.tp_size], sizes[self.tp_size : -self.ep_size], sizes[-self.ep_size :]
        if num_dropped := rows.size(0) - sum(tp_rows):
            rows = rows[:-num_dropped]
        if self.tp_size > 1:  # take this rank's run of the rows that all tensor-parallel ranks have
            rows = _Linear.apply(rows, lambda x: x.split(tp_rows)[self.tp_rank], lambda g: self._gather(g, tp_rows))
        rows = self._run_on_ranks(experts, rows, arriving, sent, received)
        if self.tp_size > 1:  # all ranks have the same gradient, of which each takes its run
            rows = _Linear.apply(rows, lambda x: self._gather(x, tp_rows), lambda g: g.split(tp_rows)[self.tp_rank])
        return nn.functional.pad(rows, (0, 0, 0, num_dropped)) if num_dropped else rows

    def _run_on_ranks(
        self, experts: Experts, rows: Tensor, arriving: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Send ``rows`` [R, H] to the expert-parallel ranks that have their experts; return what those make of them."""
        if self.ep_group is None:
            return run_experts(experts, arriving[0])(rows)
        rows = self._exchange(rows, sent, received)
        # They come sorted by rank and then by expert.
        number = torch.arange(arriving.size(1), device=rows.device).repeat(self.ep_size)
        order = number.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        # FSDP takes the mean over the ranks that share an expert, whose gradients are sums over ep ranks' tokens.
        rows = _scale_gradient(rows[order], self.ep_size)
        out = _scale_gradient(run_experts(experts, arriving.sum(0))(rows), 1 / self.ep_size)
        out = torch.zeros_like(out).index_copy(0, order, out)
        return self._exchange(out, received, sent)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Call ``all_to_all``; gradients go the way back."""
        return _Linear.apply(
            rows, lambda x: self.all_to_all(x, sent, received), lambda g: self.all_to_all(g, received, sent)
        )

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """``rows`` [sum of sent, H], ``sent[e]`` for rank e -> [sum of received, H].

        In few bits each row is a wire buffer of blocks with a scale each, as weights and gradients are.
        """
        if self.token_bits is None:
            return self._all_to_all(rows, sent, received)
        format = token_format(rows.size(1), self.token_bits, rows.dtype)
        wires = self._all_to_all(format.encode(rows.contiguous()), sent, received)
        return format.decode(wires, out=rows.new_empty(sum(received), rows.size(1)))

    def _all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.ep_group)
        row_bytes = rows.size(1) * rows.element_size()
        near = sum(n for n, is_near in zip(sent, self._is_near, strict=True) if is_near)
        own = sent[dist.get_rank(self.ep_group)]
        self.traffic.add(intra_node=(near - own) * row_bytes, inter_node=(sum(sent) - near) * row_bytes)
        return arrived

    def _gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gather the runs [sizes[rank], H] of all tensor-parallel ranks -> [R, H]."""
        # An all-gather requires equal sizes, so each rank sends its run to each.
        gathered, sent = rows.new_empty(sum(sizes), rows.size(1)), [sizes[self.tp_rank]] * self.tp_size
        dist.all_to_all_single(gathered, rows.repeat(self.tp_size, 1), list(sizes), sent, group=self.tp_group)
        return gathered


def start_reading(numbers: Tensor) -> Callable[[], list[int]]:
    """Begin to copy ``numbers`` to the host; the returned function waits for them, not for what is queued since."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    event = torch.get_device_module(numbers.device).Event()
    event.record(current_stream(numbers.device))
    return lambda: event.synchronize() or copied.tolist()


def _ranks_on_this_node(mesh: Mesh, ranks_per_node: int | None) -> list[bool]:
    """Return for each expert-parallel rank whether it runs on this rank's node."""
    rank = mesh.ep.get_local_rank()
    if ranks_per_node is None:
        nodes: Sequence[Any] = gather_node_names(mesh.ep.get_group())
    else:
        first = mesh.fsdp.get_local_rank() // mesh.ep_size * mesh.ep_size
        nodes = [(first + e) // ranks_per_node for e in range(mesh.ep_size)]
    return [node == nodes[rank] for node in nodes]


class _Linear(torch.autograd.Function):
    """Apply a linear function to a tensor, and its transpose to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], transpose: Callable[..., Tensor]) -> Tensor:
        ctx.transpose = transpose
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.transpose(gradient), None, None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    return _Linear.apply(x, lambda x: x.view_as(x), lambda gradient: gradient * factor)
