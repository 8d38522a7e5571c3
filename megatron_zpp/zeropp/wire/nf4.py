"""NF4, the 4-bit code of QLoRA (arXiv 2305.14314) for frozen weights, with double quantization, in plain torch.

A block of ``BLOCK`` values has a scale s; a value x takes the level nearest to x / s, the lower one at ties. Scales are
quantized, too: s is a multiple c, a byte, of a step that ``GROUP`` blocks share, rounded up, so that no value is cut
off. That makes 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits for each value.
A block of zeros stays zeros. If one block has a NaN or an Inf, its whole group becomes NaN.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK, GROUP = 64, 256  # values, and blocks
# Words in the names of matrices that stay out of NF4: what QLoRA keeps in 16 bits, and what routes or recurs.
SKIP = ("embed", "lm_head", "output_layer", "router", ".gate.", "expert_gate", "norm", "A_log", "conv1d")
# Quantiles of a normal distribution, as bitsandbytes has them.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def scale_bytes(num_blocks: int) -> int:
    """Return the bytes of the scales of ``num_blocks`` blocks: steps of groups in fp32, and a byte for each block."""
    return 4 * -(-num_blocks // GROUP) + num_blocks


def encode_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Encode blocks [..., n, B] of any float type: packed codes uint8 [..., n, B / 2], scales uint8 [..., s]."""
    values, num_blocks = blocks.float(), blocks.shape[-2]
    absmax = values.abs().amax(-1)  # [..., n]
    largest = F.pad(absmax, (0, -num_blocks % GROUP)).unflatten(-1, (-1, GROUP)).amax(-1)
    steps = largest / largest.new_full((), 255)  # by a tensor: CUDA divides by a number through its reciprocal
    steps = torch.where(steps.isfinite(), steps, torch.nan)  # [..., groups]
    of_block = _of_blocks(steps, num_blocks)
    counts = (absmax / of_block).ceil_().nan_to_num_(0.0).clamp_(max=255).to(torch.uint8)
    borders, _ = _tables(values.device)
    ratios = (values / (counts * of_block).unsqueeze(-1)).nan_to_num_(0.0)  # 0 / 0 in a block of zeros
    codes = torch.bucketize(ratios, borders, out_int32=True).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, torch.cat([steps.view(torch.uint8), counts], dim=-1)


def decode_blocks(packed: Tensor, scales: Tensor) -> Tensor:
    """Decode what ``encode_blocks`` returned: fp32 [..., n, B]."""
    num_blocks = packed.shape[-2]
    steps, counts = scales.split([scales.shape[-1] - num_blocks, num_blocks], dim=-1)
    of_block = counts * _of_blocks(steps.view(torch.float32), num_blocks)
    _, pairs = _tables(packed.device)
    levels = pairs.index_select(0, packed.flatten().int()).view(torch.float32).view(*packed.shape[:-1], -1)
    return levels.mul_(of_block.unsqueeze(-1))


def _of_blocks(steps: Tensor, num_blocks: int) -> Tensor:
    """Return each block's step [..., n], given the groups' steps [..., groups]."""
    return steps.repeat_interleave(GROUP, dim=-1)[..., :num_blocks]


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the borders between levels fp32 [15], and each byte's two levels: pairs of fp32, as int64 [256]."""
    with torch.inference_mode(False):
        levels = torch.tensor(LEVELS, device=device)
        codes = torch.arange(256, device=device)
        pairs = levels[torch.stack([codes & 15, codes >> 4], dim=-1)].view(torch.int64).flatten()
        return (levels[1:] + levels[:-1]) / 2, pairs  # elements of 8 bytes: rows of two are 16 times slower on a CPU
