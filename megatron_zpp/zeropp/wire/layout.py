"""The bytes in which one rank's shard of an FSDP unit is sent, and the plain records that say what is in them.

A shard of L elements is the concatenation of the unit's parameters' shards. Its wire buffer is

    | packed codes of each quantized parameter | scales of each | values of the unquantized parameters |
    | codes and scales of each parameter in NF4 |

with every parameter's part of every section starting at a multiple of 16 bytes. Blocks never span two parameters: a
parameter's last block is padded with zeros, on the wire only. A parameter with less than a block in a shard is one
smaller block. Parameters of one dimension (norms, biases) and those with few elements in a shard are sent unquantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels, nf4
from .quantization import Code

_ALIGNMENT = 16  # bytes; what a vectorized load wants
FEWEST_QUANTIZED = 32  # elements of a shard: of fewer, a scale in its place costs more than low bits save


@dataclass(frozen=True)
class ParameterShard:
    """One parameter's part of a rank's shard, padding of FSDP2 included."""

    name: str
    numel: int
    quantizable: bool  # has two dimensions or more
    is_nf4: bool = False  # in NF4 instead of the format's bits (nf4.py)


def rows_per_rank(rows: int, world_size: int) -> int:
    """Rows (dim 0) of a parameter in each rank's shard, as FSDP2 splits them; the last ranks' are padded."""
    return -(-rows // world_size)


def block_size_of(numel: int, block_size: int | None) -> int:
    """Return the elements per scale for ``numel`` elements of a parameter in a shard, at most all; 0 = unquantized."""
    if numel < min(block_size or 8, FEWEST_QUANTIZED):
        return 0
    whole = _round_up(numel, 8)
    return min(block_size or whole, whole)


@dataclass(frozen=True)
class Segment:
    """A run of elements of the shard with one encoding: one quantized parameter, or unquantized ones side by side."""

    start: int  # elements [start, stop) of the shard
    stop: int
    block_size: int  # a multiple of 8; 0 = unquantized
    codes: slice  # bytes of the wire, of packed codes or of the values themselves
    scales: slice

    @property
    def num_blocks(self) -> int:
        return -(-(self.stop - self.start) // self.block_size) if self.block_size else 0

    @property
    def padding(self) -> int:
        """Elements that the last block has on the wire only."""
        return self.num_blocks * self.block_size - (self.stop - self.start)


class WireLayout:
    """Where each of a fixed list of parameters stands in a wire buffer.

    bits: one of ``config.SUPPORTED_BITS``; None = nothing is quantized.
    block_size: elements per scale, at most; None = one scale per parameter and shard.
    dtype: of the values that are sent unquantized.
    scaling, scale_dtype: of the ``Code``; None = by bits.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterShard],
        bits: int | None,
        block_size: int | None,
        dtype: torch.dtype,
        scaling: str | None = None,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters, self.bits, self.block_size, self.dtype = tuple(parameters), bits, block_size, dtype
        self._code = Code(bits, scaling, scale_dtype) if bits is not None else None
        self.numel = sum(parameter.numel for parameter in parameters)  # L
        self.quantized, self.unquantized, self.nf4 = list[Segment](), list[Segment](), list[Segment]()
        quantized, in_nf4 = list[tuple[int, int, int]](), list[tuple[int, int, int]]()  # start, stop, block size
        unquantized, start = list[tuple[int, int]](), 0  # start, stop
        for parameter in parameters:
            stop = start + parameter.numel
            size = block_size_of(parameter.numel, block_size) if bits is not None and parameter.quantizable else 0
            if parameter.is_nf4 and (nf4_size := block_size_of(parameter.numel, nf4.BLOCK)):
                in_nf4.append((start, stop, nf4_size))
            elif size:
                quantized.append((start, stop, size))
            elif unquantized and unquantized[-1][1] == start:  # a run of small parameters is one copy
                unquantized[-1] = unquantized[-1][0], stop
            elif stop > start:
                unquantized.append((start, stop))
            start = stop

        offset = 0

        def take(nbytes: int) -> slice:
            nonlocal offset
            taken = slice(offset, offset + nbytes)
            offset = _round_up(taken.stop, _ALIGNMENT)
            return taken

        blocks = [-(-(stop - start) // size) for start, stop, size in quantized]
        codes = [take(n * size * bits // 8) for n, (_, _, size) in zip(blocks, quantized, strict=True)] if bits else []
        scales = [take(scale_dtype.itemsize * n) for n in blocks]
        for (start, stop, size), code, scale in zip(quantized, codes, scales, strict=True):
            self.quantized.append(Segment(start, stop, size, code, scale))
        for start, stop in unquantized:
            self.unquantized.append(Segment(start, stop, 0, take((stop - start) * dtype.itemsize), slice(0)))
        for start, stop, size in in_nf4:
            num_blocks = -(-(stop - start) // size)
            code, scale = take(num_blocks * size // 2), take(nf4.scale_bytes(num_blocks))
            self.nf4.append(Segment(start, stop, size, code, scale))
        self.nbytes = offset
        self.table = self._table()
        self._moves_tables = dict[torch.device, Tensor]()
        # Whether the operators have it.
        self.is_compiled = (bits is None or bits in kernels.BITS) and dtype in kernels.TYPES and not self.nf4

    @property
    def code(self) -> Code:
        """The code of quantized parameters."""
        assert self._code is not None
        return self._code

    def has_operators_on(self, device: torch.device) -> bool:
        """Return whether the operators have this format there."""
        return self.is_compiled and kernels.why_not_on(device) is None

    def moves_table(self, device: torch.device) -> Tensor:
        """Return what the operators of moves.py read of this format, on a device: made once, where the host waits."""
        if device not in self._moves_tables:
            self._moves_tables[device] = torch.ops.megatron_zpp.moves_table(self.table).to(device)
        return self._moves_tables[device]

    def bytes_of(self, index: int) -> tuple[slice, ...]:
        """Return where the codes and the scales of one parameter are in a wire buffer, or its values."""
        start = sum(parameter.numel for parameter in self.parameters[:index])
        stop = start + self.parameters[index].numel
        if start == stop:
            return ()
        (segment,) = (s for s in self.quantized + self.unquantized + self.nf4 if s.start <= start < s.stop)
        if segment.block_size:
            return segment.codes, segment.scales
        first, last = (segment.codes.start + (at - segment.start) * self.dtype.itemsize for at in (start, stop))
        return (slice(first, last),)

    def _table(self) -> list[int]:
        """Return the format as the operators take it: five numbers of all of it, then five for each segment."""
        table = [self.bits or 0, kernels.TYPES.get(self.dtype, 0), self.nbytes]
        table += [int(self._code.is_mean), self._code.scale_dtype.itemsize] if self._code is not None else [0, 4]
        for s in sorted(self.quantized + self.unquantized, key=lambda segment: segment.start):
            table += [s.start, s.stop, s.block_size, s.codes.start, s.scales.start or 0]
        return table


@dataclass(frozen=True)
class Compensation:
    """LoCo's part of an encoding: the error e that is added to the values, and where the new one goes.

    e <- decay * (beta * e + (1 - beta) * (values + e - what was sent))
    """

    format: WireLayout  # format of the errors
    error: Tensor | None  # uint8 [..., nbytes]; None = zero
    new_error: Tensor | None  # same shape as ``error``; None: not computed
    beta: float
    decay: float

    def updated_error(self, error: Tensor, compensated: Tensor, sent: Tensor) -> Tensor:
        """Return the new error as numbers, fp32 [..., L], when ``compensated`` arrived as ``sent``."""
        updated = (compensated - sent).mul_(1 - self.beta).add_(self.beta * error)
        # A NaN or Inf is sent once, and not remembered.
        return torch.where(updated.isfinite(), updated, error).mul_(self.decay)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
