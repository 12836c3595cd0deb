"""Packing, decoding and the device layout of trellis-coded weights.

A tile is 16 x 16 weights, 256 positions. Packed it is int16 (16*bits,): a circular bit stream in
which each position adds `bits` bits; its state is the last 16 of them (format page, section 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import TILE_DIM, TILE_NUMEL
from .codebook import Codebook
from .hadamard import hadamard_128
from .registry import fake, ops


@fake("trellis_pack")
def _(states: Tensor, bits: int) -> Tensor:
    return states.new_empty((*states.shape[:-1], 16 * bits), dtype=torch.int16)


@fake("trellis_unpack")
def _(trellis: Tensor) -> Tensor:
    return trellis.new_empty((*trellis.shape[:-1], TILE_NUMEL), dtype=torch.int32)


@fake("trellis_decode")
def _(trellis: Tensor, codebook: int) -> Tensor:
    *batch, k_tiles, n_tiles, _words = trellis.shape
    shape = (*batch, k_tiles * TILE_DIM, n_tiles * TILE_DIM)
    return trellis.new_empty(shape, dtype=torch.float16)


@fake("trellis_prepare")
def _(trellis: Tensor) -> Tensor:
    *batch, k_tiles, n_tiles, words = trellis.shape
    return trellis.new_empty((*batch, n_tiles, k_tiles, words))


@fake("trellis_restore")
def _(planes: Tensor) -> Tensor:
    *batch, n_tiles, k_tiles, words = planes.shape
    return planes.new_empty((*batch, k_tiles, n_tiles, words))


def bits_of(trellis: Tensor) -> int:
    """Bit rate of a packed tensor, from its last dim."""
    return trellis.shape[-1] // 16


def pack(states: Tensor, bits: int) -> Tensor:
    """States to packed tiles.

    Args:
        states: int32 (..., 256) in position order; only the low `bits` bits of each are read.
        bits: 1..8.
    Returns:
        int16 (..., 16*bits).
    """
    return ops().trellis_pack(states.contiguous(), bits)


def unpack(trellis: Tensor) -> Tensor:
    """Packed tiles int16 (..., 16*bits) to states int32 (..., 256), 0..65535."""
    return ops().trellis_unpack(trellis.contiguous())


def decode(trellis: Tensor, codebook: Codebook) -> Tensor:
    """The exact inner weight W'.

    Args:
        trellis: int16 (..., k/16, n/16, 16*bits).
    Returns:
        float16 (..., k, n).
    """
    return ops().trellis_decode(trellis.contiguous(), codebook)


def reconstruct(
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    codebook: Codebook,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """W in the original basis: diag(suh) Hblk W' Hblk diag(svh), computed in float32.

    Args:
        trellis: int16 (k/16, n/16, 16*bits), k and n multiples of 128.
        suh: float16 (k,).
        svh: float16 (n,).
    Returns:
        `dtype` (k, n), row-major.
    """
    right = hadamard_128(decode(trellis, codebook).float(), post_scale=svh)
    return hadamard_128(right.T.contiguous(), post_scale=suh).T.to(dtype).contiguous()


def prepare_trellis(trellis: Tensor) -> Tensor:
    """File layout int16 (..., k/16, n/16, 16*bits) to the layout that kernels of the same device
    read, int16 (..., n/16, k/16, 16*bits) by size: lane planes on the CPU, lane words on CUDA (in
    `exl3_ext/include/exl3/trellis.h`; CUDA asks for whole groups of 64 columns)."""
    return ops().trellis_prepare(trellis.contiguous())


def restore_trellis(planes: Tensor) -> Tensor:
    """The inverse of `prepare_trellis` on the same device."""
    return ops().trellis_restore(planes.contiguous())


def tile_positions() -> tuple[Tensor, Tensor]:
    """int64 (256,) each: row and column inside the tile of every position."""
    p = torch.arange(TILE_NUMEL)
    lane, e = p // 8, p % 8
    return 2 * (lane % 4) + e % 2 + 8 * (e % 4 // 2), lane // 4 + 8 * (e // 4)


def _stream_bits(trellis: Tensor) -> Tensor:
    """int64 (..., 256*bits) of 0 and 1, in stream order."""
    words = trellis.to(torch.int64) & 0xFFFF
    words = words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return ((words[..., None] >> torch.arange(15, -1, -1)) & 1).flatten(-2)


def pack_reference(states: Tensor, bits: int) -> Tensor:
    """`pack` bit by bit."""
    stream = ((states[..., None].long() >> torch.arange(bits - 1, -1, -1)) & 1).flatten(-2)
    words = (stream.unflatten(-1, (-1, 16)) << torch.arange(15, -1, -1)).sum(-1)
    words = words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.where(words >= 32768, words - 65536, words).to(torch.int16)


def unpack_reference(trellis: Tensor) -> Tensor:
    """`unpack` bit by bit."""
    bits = bits_of(trellis)
    ends = (torch.arange(TILE_NUMEL) + 1) * bits
    at = (ends[:, None] + torch.arange(-16, 0)) % (TILE_NUMEL * bits)
    window = _stream_bits(trellis)[..., at]
    return (window << torch.arange(15, -1, -1)).sum(-1).to(torch.int32)


def decode_reference(trellis: Tensor, codebook: Codebook) -> Tensor:
    """`decode` by table."""
    *batch, k_tiles, n_tiles, _ = trellis.shape
    values = codebook.values()[unpack_reference(trellis).long()].half()
    row, col = tile_positions()
    tiles = values.new_empty(values.shape)
    tiles[..., row * TILE_DIM + col] = values
    tiles = tiles.unflatten(-1, (TILE_DIM, TILE_DIM)).transpose(-3, -2)
    return tiles.reshape(*batch, k_tiles * TILE_DIM, n_tiles * TILE_DIM)


def prepare_reference(trellis: Tensor) -> Tensor:
    """`prepare_trellis` by the definition of the layout."""
    bits = bits_of(trellis)
    pairs = bits // 2
    stream = (_stream_bits(trellis).unflatten(-1, (-1, 8)) << torch.arange(7, -1, -1)).sum(-1)
    lanes = stream.unflatten(-1, (32, bits))  # [lane, byte]
    high, low = (lanes[..., first : 2 * pairs : 2].transpose(-1, -2) for first in (0, 1))
    out = torch.stack([low, high], -1).flatten(-3)  # little-endian bytes of the uint16 planes
    if bits % 2:
        out = torch.cat([out, lanes[..., -1]], -1)
    return out.to(torch.uint8).view(torch.int16).transpose(-3, -2).contiguous()
