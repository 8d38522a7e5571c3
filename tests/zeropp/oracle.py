"""The two-level collectives as pure functions over the inputs of all ranks, to check the distributed code.

Written for clarity, block by block and without wire buffers. It shares no step with what it checks: blocks,
random numbers and rotation have a definition of their own here. Results are equal to the bit. Rank r = n * P + p is
the p-th of node n.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.wire.layout import ParameterShard

# The step over mean |x|, by bits, and where a quarter or more of a block is zero.
STEPS = {2: 5 / 4, 3: 3 / 4, 4: 7 / 16}
STEPS_WITH_ZEROS = {2: 3 / 2, 3: 13 / 16, 4: 7 / 16}
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ERROR_HOPS = {"int8": (8, torch.float32), "bf16": (None, torch.bfloat16), "fp32": (None, torch.float32)}


def absmax_levels(
    blocks: Tensor,
    bits: int,
    noise: Tensor | None,
    scale_dtype: torch.dtype = torch.float32,
    reach: float = 1.0,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Levels of blocks [..., B] and each block's unit [..., 1]: the nearest, even at ties, or random ones by ``noise``.

    The unit is 0 or NaN where the whole block is that. ``reach``: the share of the largest level that the largest value
    takes. ``kept``: units that stay where that share is from 0.6 to 1.
    """
    values, largest = blocks.float(), torch.tensor(2.0 ** (bits - 1) - 1)
    peak = values.abs().amax(-1, keepdim=True)
    scale = peak / torch.tensor(reach * (2.0 ** (bits - 1) - 1), dtype=torch.float32)
    short = scale.to(scale_dtype)
    above = short.nextafter(torch.tensor(torch.inf, dtype=scale_dtype))
    scale = torch.where(short < scale, above, short).float()  # not rounded down: the largest value would be clipped
    unit = torch.where(scale == 0, 0.0, torch.where(scale.isfinite(), scale, torch.nan))
    if kept is not None:
        share = peak / (kept * largest)
        unit = torch.where((share >= 0.6) & (share <= 1), kept, unit)
    codes = (values / unit).round() if noise is None else (values / unit + noise).floor()
    return torch.where(unit > 0, codes.clamp(-largest, largest), 0.0), unit


def mean_levels(blocks: Tensor, bits: int, noise: Tensor | None, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same by the mean: the middle of the step that each value is in, or whole steps."""
    values, numel = blocks.float().numpy(), blocks.shape[-1]
    magnitudes, zeros = np.abs(values.astype(np.float64)), (values == 0).sum(-1, keepdims=True)
    is_finite = np.isfinite(magnitudes).all(-1, keepdims=True)
    magnitudes = np.where(is_finite, magnitudes, 0.0)
    whole_steps = zeros / numel >= 0.25
    exponent = np.frexp(magnitudes.max(-1, keepdims=True))[1] - 1
    unit = np.ldexp(1.0, np.maximum(exponent, -63) - 22)
    total = (magnitudes // unit).sum(-1, keepdims=True)  # whole numbers, exact in fp64
    step = np.where(whole_steps, np.float32(STEPS_WITH_ZEROS.get(bits, 0)), np.float32(STEPS[bits]))
    count = np.where(whole_steps, numel - zeros, numel).astype(np.float32)
    with np.errstate(all="ignore"):
        mean = step * total.astype(np.float32) / count
        scale = torch.from_numpy(mean * unit.astype(np.float32)).to(scale_dtype).float().numpy()
        in_steps = values * (np.float32(1) / scale)
        random = np.float32(0.5) if noise is None else noise.numpy()
        middle = np.floor(in_steps + (random - np.float32(0.5))).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        whole = np.floor(in_steps + random).clip(1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    levels = np.where(whole_steps, whole, middle + np.float32(0.5)).astype(np.float32)
    units = np.where(total == 0, np.float32(0), np.where(np.isinf(scale), np.float32(np.nan), scale))
    units = np.where(is_finite, units, np.float32(np.nan))
    return torch.from_numpy(np.where(units > 0, levels, np.float32(0))), torch.from_numpy(units)


def largest_levels(blocks: Tensor, count: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of one bit: signs of the ``count`` largest, of equal ones the first; the unit is their mean."""
    values = blocks.float().numpy()
    levels, units = np.zeros_like(values), np.zeros((*values.shape[:-1], 1), dtype=np.float32)
    for where in np.ndindex(*values.shape[:-1]):
        block = values[where]
        taken = [i for i in sorted(range(len(block)), key=lambda i: -abs(block[i]))[:count] if block[i] != 0]
        if not np.isfinite(block).all():
            units[where] = np.nan
        elif taken:
            unit = 2.0 ** (max(np.frexp(np.abs(block).max())[1] - 1, -63) - 22)
            total = sum(float(abs(block[i])) // unit for i in taken)  # whole numbers, exact in fp64
            mean = np.float32(total) / np.float32(len(taken)) * np.float32(unit)
            units[where] = torch.tensor(mean).to(scale_dtype).float().item()
            levels[where][taken] = np.sign(block[taken]) * (units[where] > 0)
    return torch.from_numpy(levels), torch.from_numpy(units)


def code_at(step: int, later: tuple[int | None, str | None], warmup: str | None, scaling_at_first: str | None) -> tuple:
    """Bits and scaling in the optimizer step with this index, from 0."""
    steps, at_first = (warmup or "0:0").split(":")
    return (int(at_first), scaling_at_first) if step < int(steps) else later


def seed_of(*draw: int | str) -> int:
    """The CRC-32 of what tells one draw from another, as Python writes it."""
    return zlib.crc32(str(draw).encode())


def uniform(seed: int, numel: int) -> Tensor:
    """fp32 numbers in [0, 1): the upper 24 bits of Chris Wellons's hash "lowbias32" of a counter."""
    x = np.arange(numel, dtype=np.uint32) + np.uint32(seed * 2654435769 % 2**32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return torch.from_numpy((x >> np.uint32(8)).astype(np.float32) / np.float32(2**24))


def randomly_cut(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values as one of the two bf16 numbers around each: away from zero where the rest and the noise reach 1."""
    bits = values.numpy().view(np.uint32)
    rest, random = bits % 2**16, (noise.numpy() * np.float32(2**16)).astype(np.uint32)
    cut = bits - rest + np.where(rest + random >= 2**16, np.uint32(2**16), np.uint32(0))
    return torch.from_numpy(np.where(np.isfinite(values.numpy()), cut.view(np.float32), values.numpy()))


def rotated(group: Tensor) -> Tensor:
    """fp32 [..., 32] by the orthonormal Hadamard matrix: sums and differences of those 1, 2, 4, 8 and 16 apart."""
    index = torch.arange(32)
    for apart in (1, 2, 4, 8, 16):
        other = group[..., index ^ apart]
        group = torch.where(index & apart == 0, group + other, other - group)
    return group * 32**-0.5


@dataclass(frozen=True)
class Hop:
    """How shards of some parameters travel: in which bits, blocks, dtype where unquantized, and with which scales."""

    parameters: Sequence[ParameterShard]
    bits: int | None
    block_size: int | None
    dtype: torch.dtype
    scaling: str | None = None
    scale_dtype: torch.dtype = torch.float32

    @property
    def is_mean(self) -> bool:
        return self.scaling == "mean" or (self.scaling is None and self.bits in (2, 3))

    def most_of_one_bit(self, place: slice) -> int:
        """How many values of a block a code of one bit keeps: a fifth of what the whole block has room for."""
        ends = itertools.accumulate(parameter.numel for parameter in self.parameters)
        numel = next(p.numel for p, end in zip(self.parameters, ends, strict=True) if place.start < end)
        whole = -(-numel // 8) * 8
        return min(self.block_size or whole, whole) // 5

    def is_quantized(self, parameter: ParameterShard) -> bool:
        fewest = min(self.block_size or 8, 32)
        return self.bits is not None and parameter.quantizable and parameter.numel >= fewest

    def blocks(self) -> Iterator[slice]:
        """The places of all blocks of quantized parameters in a shard."""
        start = 0
        for parameter in self.parameters:
            stop, size = start + parameter.numel, self.block_size or parameter.numel
            for begin in range(start, stop, size) if self.is_quantized(parameter) else ():
                yield slice(begin, min(begin + size, stop))
            start = stop

    def transmit_kept(self, shards: Tensor, scales: dict[int, Tensor]) -> Tensor:
        """What arrives, in fp32, of all ranks' shards [W, L] whose blocks keep their scales while they fit."""
        arrived = shards.to(self.dtype).float().clone()
        for place in self.blocks():
            assert self.bits is not None
            kept = scales.get(place.start)
            levels, scales[place.start] = absmax_levels(shards[:, place], self.bits, None, self.scale_dtype, 0.9, kept)
            arrived[:, place] = levels * scales[place.start]
        return arrived

    def transmit_levels(self, shards: Tensor, noise_seed: int | None) -> tuple[Tensor, Tensor]:
        """What arrives of one rank's shards [..., L], in fp32; ``noise_seed`` rounds stochastically. And its levels.

        Levels [..., L] are NaN where there are none, or where a block's unit is 0 or NaN.
        """
        arrived, levels = shards.to(self.dtype).float().clone(), torch.full(shards.shape, torch.nan)
        noise = None if noise_seed is None else uniform(noise_seed, shards.numel()).view(shards.shape)
        one_way = mean_levels if self.is_mean else absmax_levels
        for place in self.blocks():
            assert self.bits is not None
            noise_of_block = None if noise is None else noise[..., place]
            if self.bits == 1:
                of_block, unit = largest_levels(shards[..., place], self.most_of_one_bit(place), self.scale_dtype)
            else:
                of_block, unit = one_way(shards[..., place], self.bits, noise_of_block, self.scale_dtype)
            arrived[..., place] = of_block * unit
            levels[..., place] = torch.where(unit > 0, of_block, torch.nan)
        return arrived, levels

    def transmit_all(self, shards: Tensor, noise_seed: int | None) -> Tensor:
        """What arrives of one rank's shards [..., L], in fp32."""
        return self.transmit_levels(shards, noise_seed)[0]

    def rotate(self, shards: Tensor) -> Tensor:
        """Rotate each quantized parameter of shards [..., L], as far as it makes up groups of 32."""
        turned, start = shards.float().clone(), 0
        for parameter in self.parameters:
            if self.is_quantized(parameter):
                groups = slice(start, start + parameter.numel // 32 * 32)
                turned[..., groups] = rotated(turned[..., groups].unflatten(-1, (-1, 32))).flatten(-2)
            start += parameter.numel
        return turned


@dataclass
class WeightState:
    """What the ranks keep of the weights from one version of the parameters to the next."""

    versions: int = 0
    scales: dict[int, Tensor] = field(default_factory=dict)  # kept of all ranks [W, 1], by where a block begins


def all_gather(
    shards: Sequence[Tensor],
    config: ZeroPPConfig,
    num_nodes: int,
    parameters: Sequence[ParameterShard],
    state: WeightState,
    unit: str = "",
) -> Tensor:
    """What every rank holds after the all-gather of a new version of the W ranks' shards [L]: [W, L]."""
    dtype, scale_dtype = shards[0].dtype, SCALE_DTYPES[config.scale_dtype]
    state.versions += 1

    def noise_seed(hop: str, source: int) -> int | None:
        if config.weight_rounding == "nearest":
            return None
        return seed_of(config.seed, "weights", hop, unit, source, state.versions)

    def send(values: Sequence[Tensor], bits: int | None, block_size: int | None, scaling: str | None) -> list[Tensor]:
        hop = Hop(parameters, bits, block_size, dtype, scaling, scale_dtype)
        return [hop.transmit_all(v, noise_seed("inter", r)) for r, v in enumerate(values)]

    has_secondary = config.hpz_partition_size > 1 and num_nodes > 1
    bits = config.weight_bits if config.quantized_weights else None
    if has_secondary and config.weight_moves:
        hop = Hop(parameters, bits, config.weight_block_size, dtype, "absmax", scale_dtype)
        sent = list(hop.transmit_kept(torch.stack(list(shards)), state.scales))
    else:
        sent = send(shards, bits, config.weight_block_size, config.weight_scaling)
    gathered = [arrived.to(dtype) for arrived in sent]
    if has_secondary and config.weight_intra_bits is not None:
        scaling = config.weight_intra_scaling
        hop = Hop(parameters, config.weight_intra_bits, config.weight_block_size, dtype, scaling, scale_dtype)
        # By local rank p: the shards [N, L] that the ranks with that p hold in their secondary partitions.
        partitions = torch.stack(gathered).unflatten(0, (num_nodes, -1)).transpose(0, 1)
        arrived = [hop.transmit_all(part, noise_seed("intra", p)) for p, part in enumerate(partitions)]
        return torch.stack(arrived, dim=1).flatten(0, 1).to(dtype)
    return torch.stack(gathered)


class ElementScales:
    """How much quieter each element of pieces [N, L] is than the loudest of its block, in sixteenths of an octave."""

    def __init__(self, hop: Hop, shape: torch.Size) -> None:
        self.hop, self.quieter, self.steps = hop, np.zeros(shape, dtype=np.int64), 0

    def transmit_all(self, pieces: Tensor, noise_seed: int | None) -> Tensor:
        """What arrives of pieces [N, L], each element of which is sent in units of its scale."""
        scales = torch.from_numpy((0.5 ** (self.quieter / 16)).astype(np.float32))
        sent, levels = self.hop.transmit_levels(pieces / scales, noise_seed)
        self._learn(levels.double().numpy())
        return sent * scales

    def _learn(self, levels: np.ndarray) -> None:
        bits = self.hop.bits
        assert bits is not None
        usual = math.pi / 2 / STEPS[bits] ** 2 if self.hop.is_mean else ((2 ** (bits - 1) - 1) / 3) ** 2
        usual = 0.2 if bits == 1 else usual
        weight = max(1 / (2 + self.steps), 0.02)
        octaves = np.log2(1 - weight + weight * levels**2 / usual) / 2  # half of the square's octaves
        louder = np.floor(16 * octaves + self.steps * 0.6180339887498949 % 1)
        self.quieter -= np.where(np.isnan(levels), 0, louder).astype(np.int64)
        for place in self.hop.blocks():
            self.quieter[:, place] -= self.quieter[:, place].min(axis=1, keepdims=True)
        self.quieter = self.quieter.clip(0, 255)
        self.steps += 1


@dataclass
class GradientState:
    """What the ranks keep of the gradients from step to step."""

    steps: int = 0
    steps_since_reset: int = 0
    errors: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # LoCo's e by (hop, rank)
    scales: dict[int, ElementScales] = field(default_factory=dict)  # by rank, for sends between nodes


def reduce_scatter(
    micro_batches: Sequence[Sequence[Tensor]],
    config: ZeroPPConfig,
    num_nodes: int,
    parameters: Sequence[ParameterShard],
    state: GradientState,
    unit: str = "",
) -> list[Tensor]:
    """Each rank's sum over ranks and micro-batches, fp32 [L], from gradients [micro-batch][rank] of shape [W, L]."""
    world_size, dtype = len(micro_batches[0]), micro_batches[0][0].dtype
    ranks_per_node = world_size // num_nodes
    between = code_at(state.steps, (config.gradient_bits, config.gradient_scaling), config.gradient_bits_warmup, None)
    choices = {
        "intra": (config.gradient_intra_bits, config.gradient_intra_scaling, dtype),
        "inter": (*between, dtype if config.gradient_bits is None else torch.float32),
    }
    scale_dtype = SCALE_DTYPES[config.scale_dtype]
    hops = {
        name: Hop(parameters, bits, config.gradient_block_size, unquantized, scaling, scale_dtype)
        for name, (bits, scaling, unquantized) in choices.items()
    }
    rotation = hops["inter"] if config.gradient_bits is not None else hops["intra"]

    def send(hop: str, rank: int, pieces: Tensor, micro_batch: int) -> Tensor:
        """What arrives of pieces [G, ..., L] that ``rank`` sends, in fp32."""
        noise_seed, loco = None, config.loco
        if config.gradient_rounding == "stochastic":
            noise_seed = seed_of(config.seed, "gradients", hop, unit, rank, state.steps, micro_batch)
        over: Hop | ElementScales = hops[hop]
        if config.gradient_element_scales and hop == "inter":
            over = state.scales.setdefault(rank, ElementScales(hops[hop], pieces.shape))
            over.hop = hops[hop]  # with this step's bits
        if loco is None or (hop == "intra" and loco.hops == "inter"):
            return over.transmit_all(pieces, noise_seed)
        error = state.errors.get((hop, rank), torch.zeros_like(pieces, dtype=torch.float32))
        compensated = pieces + error
        sent = over.transmit_all(compensated, noise_seed)
        moved = loco.beta * error + (1 - loco.beta) * (compensated - sent)
        error = torch.where(moved.isfinite(), moved, error)
        if micro_batch == len(micro_batches) - 1 and loco.reset == "decay" and loco.reset_interval is not None:
            error = error * (1 - 1 / loco.reset_interval)
        bits, error_dtype = _ERROR_HOPS[loco.error_dtype]
        kept = Hop(parameters, bits, config.gradient_block_size, error_dtype)
        state.errors[hop, rank] = kept.transmit_all(error, None)
        return sent

    def kept(rank: int, total: Tensor, micro_batch: int) -> Tensor:
        """Return the rest of a node's sum [N, L] after a micro-batch that is not the last."""
        if config.gradient_sum_dtype == "fp32":
            return total
        noise_seed = seed_of(config.seed, "sums", unit, rank, state.steps, micro_batch)
        if config.gradient_sum_dtype == "bf16":
            return randomly_cut(total, uniform(noise_seed, total.numel()).view(total.shape))
        return Hop(parameters, 8, config.gradient_block_size, torch.float32).transmit_all(total, noise_seed)

    node_sums: list[Tensor] = []  # by rank: [N, L], for the ranks with its p
    for i, gradients in enumerate(micro_batches):
        pieces = [g.view(num_nodes, ranks_per_node, -1).transpose(0, 1) for g in gradients]  # by rank: [P, N, L]
        if config.hadamard:
            pieces = [rotation.rotate(p) for p in pieces]
        arrived = [p.float() if ranks_per_node == 1 else send("intra", rank, p, i) for rank, p in enumerate(pieces)]
        for rank in range(world_size):
            node, local_rank = divmod(rank, ranks_per_node)
            of_node = arrived[node * ranks_per_node : (node + 1) * ranks_per_node]
            micro_batch_sum = _sum([sent[local_rank] for sent in of_node])
            if i == 0:
                node_sums.append(micro_batch_sum)
            else:
                node_sums[rank] = kept(rank, node_sums[rank], i - 1) + micro_batch_sum

    arrived = node_sums
    if num_nodes > 1:
        arrived = [send("inter", rank, node_sum, len(micro_batches) - 1) for rank, node_sum in enumerate(node_sums)]
    totals = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, ranks_per_node)
        total = _sum([arrived[peer * ranks_per_node + local_rank][node] for peer in range(num_nodes)])
        totals.append(rotation.rotate(total) if config.hadamard else total)

    state.steps += 1
    state.steps_since_reset += 1
    loco = config.loco
    if loco is not None and loco.reset == "hard" and state.steps_since_reset == loco.reset_interval:
        state.errors, state.steps_since_reset = {}, 0
    return totals


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """In order, so that rounding is the same."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
