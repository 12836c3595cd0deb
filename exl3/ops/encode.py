"""Trellis search: the circular state sequence whose values are nearest to a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .codebook import Codebook
from .registry import fake, ops

TILE = 256
STATES = 65536


@fake("trellis_encode")
def _(tiles: Tensor, codebook: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    trellis = tiles.new_empty(tiles.shape[0], 16 * bits, dtype=torch.int16)
    return trellis, torch.empty_like(tiles)


def trellis_encode(tiles: Tensor, *, bits: int, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Encode tiles one by one: a Viterbi search over 16-bit states, closed into a circle.

    The result depends on the tile alone: not on the thread count, the other tiles of the call or
    the instruction level. A call cannot be interrupted, so keep it to about a second of work
    (some thousand tiles a core).

    Args:
        tiles: float32 (t, 256), contiguous, in stored order (format page, section 2), on the scale
            of the codebook (unit variance times `codebook.std`), finite. t may be 0.
        bits: bits per weight, 1..8.
        codebook: which values the states have.
    Returns:
        Packed trellis int16 (t, 16*bits) and float32 (t, 256), the values it decodes to.
    Raises:
        ConfigError: `bits` out of range.
        ShapeError: `tiles` not float32 (t, 256).
        RuntimeError: a tile has a NaN or an infinity; the message names the first.
    Source: QTIP (arXiv 2406.11235); format page, section 4.6.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"trellis_encode: bits is {bits}, expected 1 to 8")
    if tiles.dim() != 2 or tiles.shape[1] != TILE or tiles.dtype != torch.float32:
        raise ShapeError(
            f"trellis_encode: tiles is {tiles.dtype} {tuple(tiles.shape)}, "
            f"expected torch.float32 (t, {TILE})"
        )
    return ops().trellis_encode(tiles.contiguous(), Codebook(codebook).values(), bits)


def trellis_encode_reference(tiles: Tensor, *, bits: int, codebook: Codebook) -> Tensor:
    """States int32 (t, 256) by two full passes in float64; slow (a second a tile)."""
    values = Codebook(codebook).values().double()
    return torch.stack([_encode_tile(tile.double(), values, bits) for tile in tiles])


def _encode_tile(tile: Tensor, values: Tensor, bits: int) -> Tensor:
    half = TILE // 2
    states = _viterbi(tile.roll(-half), values, bits, None).roll(half)
    return _viterbi(tile, values, bits, int(states[0]) >> bits)


def _viterbi(tile: Tensor, values: Tensor, bits: int, node: int | None) -> Tensor:
    """Best state sequence; `node` is where it must start and end, None: anywhere."""
    nodes, fan = STATES >> bits, 1 << bits
    cost = torch.zeros(nodes, dtype=torch.float64)
    if node is not None:
        cost.fill_(torch.inf)
        cost[node] = 0
    choices = []
    for weight in tile:
        edges = cost.repeat_interleave(fan) + (values - weight) ** 2
        cost, choice = edges.view(fan, nodes).min(0)
        choices.append(choice)
    node = int(cost.argmin()) if node is None else node
    states = torch.empty(TILE, dtype=torch.int32)
    for position in range(TILE - 1, -1, -1):
        states[position] = int(choices[position][node]) * nodes + node
        node = int(states[position]) >> bits
    return states
