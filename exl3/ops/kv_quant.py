"""Quantised keys and values: the format, in plain torch. The ops are in `rope` and `attention`.

The dims of a head fall into blocks of 32, the last one may be shorter. A block is rotated by a
normalised Walsh-Hadamard matrix, then stored as codes of `bits` bits and one float16 scale. See
doc/kernels/kv_quant.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError

BLOCK = 32
MIN_BITS, MAX_BITS = 2, 8
_SHIFTS = (0.0, 0.4, 0.8, 1.2)  # where the greatest magnitude of a block may lie, in levels


def blocks_of(dim: int) -> int:
    """Blocks of a head of `dim` values."""
    return -(-dim // BLOCK)


@dataclass(frozen=True, slots=True)
class QuantPages:
    """Quantised keys or values of one layer.

    Attributes:
        words: int32 (pages, 256, kv_heads, blocks * bits).
        scales: float16 (pages, 256, kv_heads, blocks).
        dim: values of a head; blocks = ceil(dim / 32).
    """

    words: Tensor
    scales: Tensor
    dim: int

    @property
    def bits(self) -> int:
        """Bits per value, scales left out."""
        return self.words.shape[-1] // self.scales.shape[-1]


def new_quant_pages(
    pages: int, kv_heads: int, dim: int, *, bits: int, device: torch.device | None = None
) -> QuantPages:
    """Empty pages: all zeros, which decode to zeros.

    Raises:
        ConfigError: bits outside 2..8.
    """
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError(f"a quantised cache has {MIN_BITS} to {MAX_BITS} bits, got {bits}")
    shape = (pages, PAGE_SIZE, kv_heads, blocks_of(dim))
    words = torch.zeros((*shape[:3], shape[3] * bits), dtype=torch.int32, device=device)
    return QuantPages(words, torch.zeros(shape, dtype=torch.float16, device=device), dim)


def _hadamard(size: int) -> Tensor:
    """Normalised Walsh-Hadamard matrix, float64 (size, size), size a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def rotate_reference(x: Tensor) -> Tensor:
    """Rotate heads (..., dim) block by block, float64; its own inverse.

    A last block of fewer than 32 values turns in pieces of the largest power of two that divides
    its size.
    """
    parts = []
    for block in x.to(torch.float64).split(BLOCK, dim=-1):
        size = block.shape[-1]
        turn = size & -size
        pieces = block.unflatten(-1, (size // turn, turn))
        parts.append((pieces @ _hadamard(turn).to(x.device)).flatten(-2))
    return torch.cat(parts, -1)


def plane_widths(bits: int) -> list[int]:
    """Widths of the planes of a block, in order: the binary digits of `bits`."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes int64 (..., 32) to words int32 (..., bits)."""
    words, low = [], 0
    for width in plane_widths(bits):
        each = 16 // width
        part = (codes >> low) & ((1 << width) - 1)
        pair = part[..., :16] | part[..., 16:] << 16
        shifts = torch.arange(each, device=codes.device) * width
        words.append((pair.unflatten(-1, (width, each)) << shifts).sum(-1))
        low += width
    joined = torch.cat(words, -1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Words int32 (..., bits) to codes int64 (..., 32)."""
    codes = torch.zeros((*words.shape[:-1], BLOCK), dtype=torch.int64, device=words.device)
    wide, low = words.to(torch.int64) & 0xFFFFFFFF, 0
    for width in plane_widths(bits):
        each, mask = 16 // width, (1 << width) - 1
        shifts = torch.arange(each, device=words.device) * width
        pair = (wide[..., :width, None] >> shifts).flatten(-2)
        codes |= torch.cat([pair & mask, pair >> 16 & mask], -1) << low
        wide, low = wide[..., width:], low + width
    return codes


def _levels(x: Tensor, step: Tensor, bits: int) -> Tensor:
    half = 2.0 ** (bits - 1)
    per_step = torch.where((step > 0) & step.isfinite(), 1.0 / step, 0.0)
    return (x * per_step + (half - 0.5)).round().clamp(0, 2 * half - 1)


def quantise_reference(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantise heads (..., dim).

    The scale is the one of four candidates with the least squared error; the values of a block that
    is not finite all become NaN.

    Returns:
        Words int32 (..., blocks * bits) and scales float16 (..., blocks).
    """
    words, scales = [], []
    half = 2.0 ** (bits - 1)
    for block in rotate_reference(x).split(BLOCK, dim=-1):
        most = block.abs().amax(-1) + (block * 0.0).sum(-1)  # NaN if a value is not finite
        best: Tensor | None = None
        least = torch.full_like(most, torch.inf)
        for shift in _SHIFTS:
            scale = (most * (half / (half - 0.5 + shift))).to(torch.float16)
            step = scale.to(torch.float64)[..., None] / half
            error = ((block - (_levels(block, step, bits) - (half - 0.5)) * step) ** 2).sum(-1)
            better = error < least
            best = scale if best is None else torch.where(better, scale, best)
            least = torch.minimum(error, least)
        assert best is not None
        step = best.to(torch.float64)[..., None] / half
        codes = _levels(block, step, bits)
        codes = torch.where((step > 0) & step.isfinite(), codes, 0.0).to(torch.int64)
        codes = torch.nn.functional.pad(codes, (0, BLOCK - block.shape[-1]))
        words.append(pack_codes(codes, bits))
        scales.append(best[..., None])
    return torch.cat(words, -1), torch.cat(scales, -1)


def dequantise_reference(pages: QuantPages, *, rotated: bool = False) -> Tensor:
    """Decode to float64 (pages, 256, kv_heads, dim); `rotated`: as the codes are."""
    bits = pages.bits
    codes = unpack_codes(pages.words.unflatten(-1, (-1, bits)), bits).to(torch.float64)
    half = 2.0 ** (bits - 1)
    values = (codes - (half - 0.5)) * pages.scales.to(torch.float64)[..., None] / half
    values = values.flatten(-2)[..., : pages.dim]
    return values if rotated else rotate_reference(values)
