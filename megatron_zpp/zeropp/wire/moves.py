"""Moved codes: a wire buffer of weights as what changed since the buffer that its receivers have. Nothing is lost.

An optimizer step moves few weights by more than a step of their code. So blocks keep their scales while they can
(``keeps_scales``), and what is sent are the moves: the code of each element, less its code in the old buffer
(``encode_moves``, ``apply_moves``). Unquantized values of 16 bits are codes too: their bits as integers, in the order
of the values. The bytes of a buffer of moves:

    | a bit per block: has another scale | those scales | unquantized values of 32 bits | chunk headers | chunks |

A block with another scale is predicted: its old values, rounded to codes of the new scale. A chunk has up to ``CHUNK``
codes; m1 of them moved, m2 of these by more than 1. Its sections, each from a byte on, are Rice codes and bits:

    gaps between the m1 codes | their signs | gaps, counted in moved codes, between the m2 | their sizes, less 2

A Rice code of v is v >> k in unary, zeros and a one, and the k low bits. The unary parts come first, then the low bits.
Header: m1, m2, three times k, the bytes of the chunk. All integers and bits are little-endian.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Segment, WireLayout
from .quantization import pack_bits, unpack_bits

CHUNK = 16384  # codes
HEADER_BYTES = 12  # uint16 m1, m2; uint8 k of gaps, of gaps between the m2, of sizes, and 0; uint32 bytes


@dataclass(frozen=True)
class Moves:
    """Moves that turn the wire buffer ``old`` into ``new``: measured, not yet written: the host must know n first."""

    format: WireLayout
    old: Tensor  # uint8 [nbytes]
    new: Tensor
    measured: list[Tensor]  # n, int64 [1] on the buffers' device, and what ``write`` needs besides

    @property
    def num_bytes(self) -> Tensor:
        """The bytes n of the moves, int64 [1]."""
        return self.measured[0]

    def write(self, num_bytes: int) -> Tensor:
        """Write the moves into uint8 [num_bytes], which may be more than n."""
        if _has_kernels(self.format, self.old):
            tables = (self.format.table, self.format.moves_table(self.old.device))
            return torch.ops.megatron_zpp.write_moves(self.old, self.new, *tables, self.measured, num_bytes)
        written = self.measured[1]
        return torch.nn.functional.pad(written, (0, num_bytes - len(written)))


def encode_moves(format: WireLayout, old: Tensor, new: Tensor) -> Tensor:
    """Encode what makes the wire buffer ``new`` of ``old``, both uint8 [nbytes]: uint8 [n], of any n."""
    moves = measure_moves(format, old, new)
    return moves.write(int(moves.num_bytes))


def measure_moves(format: WireLayout, old: Tensor, new: Tensor) -> Moves:
    """Measure what makes the wire buffer ``new`` of ``old``, both uint8 [nbytes]. The host does not wait for a GPU."""
    if _has_kernels(format, old):
        tables = (format.table, format.moves_table(old.device))
        return Moves(format, old, new, torch.ops.megatron_zpp.measure_moves(old, new, *tables))
    before, scales = _all_scales(format, old), _all_scales(format, new)
    as_bits = torch.int32 if scales.itemsize == 4 else torch.int16  # NaN equals itself
    has_new_scale = before.view(as_bits) != scales.view(as_bits)  # [blocks]
    moved = _codes(format, new) - _predicted(format, old, scales)
    parts = [_pack(has_new_scale), scales[has_new_scale].view(torch.uint8), *_raw(format, new)]
    chunks = [_encode_chunk(chunk) for chunk in _chunks(moved)]
    headers, bodies = [header for header, _ in chunks], [body for _, body in chunks]
    written = torch.cat([part.to(old.device) for part in (*parts, *headers, *bodies)])
    return Moves(format, old, new, [torch.tensor([len(written)], device=old.device), written])


def apply_moves(format: WireLayout, wires: Tensor, moves: Tensor) -> Tensor:
    """Move wire buffers uint8 [R, nbytes], in place, by buffers of moves uint8 [R, n] or longer; returns them."""
    if _has_kernels(format, wires):
        torch.ops.megatron_zpp.apply_moves(moves, format.table, format.moves_table(wires.device), wires)
        return wires
    for wire, row in zip(wires, moves, strict=True):
        _apply(format, wire, row)
    return wires


def _apply(format: WireLayout, wire: Tensor, moves: Tensor) -> None:
    at = 0

    def take(nbytes: int) -> Tensor:
        nonlocal at
        at += nbytes
        return moves[at - nbytes : at]

    scales = _all_scales(format, wire)
    has_new_scale = _unpack(take(-(-len(scales) // 8)))[: len(scales)]
    scales = scales.clone()
    scales[has_new_scale] = take(int(has_new_scale.sum()) * scales.itemsize).clone().view(scales.dtype)
    raw = [take(part.numel()) for part in _raw(format, wire)]
    codes = _predicted(format, wire, scales)
    chunks = _chunks(codes)
    for chunk, header in zip(chunks, take(HEADER_BYTES * len(chunks)).view(-1, HEADER_BYTES), strict=True):
        _move_chunk(chunk, header, take(int(header[8:].clone().view(torch.int32))))
    _write(format, wire, codes, scales, raw)


def _chunks(codes: Tensor) -> Sequence[Tensor]:
    return codes.split(CHUNK) if len(codes) else ()


def _encode_chunk(moved: Tensor) -> tuple[Tensor, Tensor]:
    """Return the header and the bytes of a chunk of moves int32 [up to CHUNK]."""
    positions = moved.nonzero().flatten()
    sizes = moved[positions].abs() - 1
    further = sizes.nonzero().flatten()
    lists = [_gaps(positions), _gaps(further), sizes[further].long() - 1]
    ks = [_rice_parameter(values) for values in lists]
    gaps, further_gaps, more = (_rice(values, k) for values, k in zip(lists, ks, strict=True))
    body = torch.cat([gaps, _pack(moved[positions] < 0), further_gaps, more])
    counts = torch.tensor([len(positions), len(further)], dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    nbytes = torch.tensor([len(body)], dtype=torch.int32).view(torch.uint8)
    return torch.cat([counts, torch.tensor([*ks, 0], dtype=torch.uint8), nbytes]), body


def _move_chunk(codes: Tensor, header: Tensor, body: Tensor) -> None:
    m1, m2 = header[:4].clone().view(torch.uint16).tolist()
    k1, k2, k3 = header[4:7].tolist()
    gaps, body = _unrice(body, m1, k1)
    signs, body = _unpack(body[: -(-m1 // 8)])[:m1], body[-(-m1 // 8) :]
    further_gaps, body = _unrice(body, m2, k2)
    more, _ = _unrice(body, m2, k3)
    sizes = torch.ones_like(gaps)
    sizes[(further_gaps + 1).cumsum(0) - 1] += more + 1
    codes[(gaps + 1).cumsum(0) - 1] += torch.where(signs, -sizes, sizes).to(codes.dtype)


def _gaps(positions: Tensor) -> Tensor:
    return positions.diff(prepend=positions.new_full((1,), -1)) - 1


def _rice_parameter(values: Tensor) -> int:
    """Return the best k for a geometric distribution of the same mean, to a few percent (Kiely 2004)."""
    middle = (2 * int(values.sum()) + len(values)) * 77 // (160 * max(1, len(values)))
    return max(0, middle.bit_length() - 1)


def _rice(values: Tensor, k: int) -> Tensor:
    ends = ((values >> k) + 1).cumsum(0) - 1
    unary = torch.zeros(int(ends[-1]) + 1 if len(ends) else 0, dtype=torch.bool, device=values.device)
    unary[ends] = True
    low = (values.unsqueeze(1) >> torch.arange(k, device=values.device)) & 1
    return torch.cat([_pack(unary), _pack(low.flatten().bool())])


def _unrice(body: Tensor, count: int, k: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` values, and the bytes after them."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=body.device), body
    ends = _unpack(body).nonzero().flatten()[:count]
    low_at = int(ends[-1]) // 8 + 1
    stop = low_at + -(-count * k // 8)
    low = _unpack(body[low_at:stop])[: count * k].view(count, k).long()
    return (_gaps(ends) << k) + (low << torch.arange(k, device=body.device)).sum(1), body[stop:]


def _pack(bits: Tensor) -> Tensor:
    return pack_bits(torch.nn.functional.pad(bits, (0, -len(bits) % 8)).to(torch.int8), 1)


def _unpack(packed: Tensor) -> Tensor:
    return unpack_bits(packed, 1).bool()


def _has_kernels(format: WireLayout, tensor: Tensor) -> bool:
    return format.has_operators_on(tensor.device)


def _scales(format: WireLayout, segment: Segment, wire: Tensor) -> Tensor:
    return wire[..., segment.scales].view(format.code.scale_dtype)


def _all_scales(format: WireLayout, wire: Tensor) -> Tensor:
    empty = torch.empty(0, device=wire.device)
    return torch.cat([_scales(format, segment, wire) for segment in format.quantized]) if format.quantized else empty


def _raw(format: WireLayout, wire: Tensor) -> list[Tensor]:
    """Unquantized values of 32 bits, which are sent as they are."""
    return [wire[segment.codes] for segment in format.unquantized if format.dtype.itemsize == 4]


def _codes(format: WireLayout, wire: Tensor) -> Tensor:
    """Return all codes in a wire buffer uint8 [nbytes], and unquantized values of 16 bits as integers: int32 [n]."""
    parts = [torch.zeros(0, dtype=torch.int32, device=wire.device)]
    for segment in format.quantized:
        parts.append(unpack_bits(wire[segment.codes], format.code.bits).int())
    if format.dtype.itemsize == 2:
        for segment in format.unquantized:
            bits = wire[segment.codes].view(torch.int16).int()
            parts.append(torch.where(bits < 0, -1 - (bits & 0x7FFF), bits))  # in the order of the values
    return torch.cat(parts)


def _predicted(format: WireLayout, wire: Tensor, scales: Tensor) -> Tensor:
    """Predict the codes in a wire buffer as codes of other scales, one for each block: int32 [n]."""
    codes = _codes(format, wire)
    for segment, of_codes, of_scales in _spans(format):
        before, after = _scales(format, segment, wire).float(), scales[of_scales].float()
        blocks = codes[of_codes].view(segment.num_blocks, segment.block_size)
        rounded = (blocks.float() * (before / after).unsqueeze(1)).round_()
        rounded = torch.where(rounded.isfinite(), rounded, 0.0).clamp_(-format.code.qmax, format.code.qmax)
        blocks.copy_(torch.where((before == after).unsqueeze(1), blocks, rounded.int()))
    return codes


def _spans(format: WireLayout) -> Iterator[tuple[Segment, slice, slice]]:
    """Yield each quantized parameter with its places in all codes [n], and in all scales [blocks]."""
    start, block = 0, 0
    for segment in format.quantized:
        stop = start + segment.num_blocks * segment.block_size
        yield segment, slice(start, stop), slice(block, block + segment.num_blocks)
        start, block = stop, block + segment.num_blocks


def _write(format: WireLayout, wire: Tensor, codes: Tensor, scales: Tensor, raw: list[Tensor]) -> None:
    start = 0
    for segment, of_codes, of_scales in _spans(format):
        wire[segment.codes] = pack_bits(codes[of_codes].to(torch.int8), format.code.bits)
        wire[segment.scales] = scales[of_scales].clone().view(torch.uint8)
        start = of_codes.stop
    for index, segment in enumerate(format.unquantized):
        if raw:
            wire[segment.codes] = raw[index]
        else:
            stop = start + segment.stop - segment.start
            values = codes[start:stop]
            bits = torch.where(values < 0, -1 - values - 0x8000, values).to(torch.int16)
            wire[segment.codes], start = bits.view(torch.uint8), stop
