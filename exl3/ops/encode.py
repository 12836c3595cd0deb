"""Trellis search: the circular state sequence whose values are nearest to a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .codebook import Codebook
from .registry import fake, ops

TILE = 256
STATES = 65536
LANES = 16
COARSE_LANES = 32
# The fixed point of `exl3/encode.h`.
COARSE_BITS = 3
TAGGED_BITS = 4
COARSE_LARGEST = (800, 800, 1150)  # of a value at 1 to 3 bits, in steps of the difference
COARSE_SHIFT = (3, 3, 4)
COARSE_LIMIT = 1.15
SQUARE = 2048
LARGEST = 10900  # of a value at 4 bits: its square over SQUARE fits 16 bits
LIMIT = 1.5


@fake("trellis_encode")
def _(
    tiles: Tensor,
    codebook: Tensor,
    table: Tensor,
    weight_limit: float,
    weight_scale: float,
    gain: int,
    bits: int,
    check: bool,
) -> tuple[Tensor, Tensor]:
    trellis = tiles.new_empty(tiles.shape[0], 16 * bits, dtype=torch.int16)
    return trellis, torch.empty_like(tiles)


@dataclass(frozen=True, slots=True)
class SearchTable:
    """What the integer search of one codebook and bit rate needs; see `exl3/encode.h`."""

    values: Tensor
    table: Tensor
    weight_limit: float
    weight_scale: float
    gain: int


@cache
def search_table(codebook: Codebook, bits: int, device: torch.device | str = "cpu") -> SearchTable:
    """The edges of one codebook and bit rate in fixed point.

    Up to 3 bits and from 5 bits on the table holds c, to be subtracted and squared; up to 3 bits
    differences end at 3.1 (1 and 2 bits) or 2.2 standard deviations. At 4 bits an edge is
    c^2 - 2wc as two products of int16, all multiples of 16. The rounding costs less than 0.1 % of
    the error.
    """
    exact = codebook.values()
    values = exact.double()
    most = float(values.abs().max())
    if bits <= COARSE_BITS:
        weight_scale = COARSE_LARGEST[bits - 1] / most
        numbers = (values * weight_scale).round().to(torch.int16) << COARSE_SHIFT[bits - 1]
        table = _rows(numbers, bits, COARSE_LANES)
        return SearchTable(exact.to(device), table.to(device), COARSE_LIMIT * most, weight_scale, 0)
    limit = LIMIT * most
    if bits == TAGGED_BITS:
        second = (values * (LARGEST / most)).round()
        first = ((second**2 + SQUARE / 2) / SQUARE).floor() - 32768
        weight_scale, gain = -2 * LARGEST / most / 2**bits, SQUARE >> bits
    else:
        weight_scale, gain = math.floor(32767 / (most + limit)), 0
        first, second = (values * weight_scale).round(), torch.zeros_like(values)
    pairs = _rows(torch.stack([first, second], -1).to(torch.int16), bits, LANES)
    return SearchTable(exact.to(device), pairs.to(device), limit, weight_scale, gain)


def _rows(numbers: Tensor, bits: int, lanes: int) -> Tensor:
    """(65536, ...) by state to (nodes / lanes, 2^bits, lanes, ...)."""
    fan, more = 1 << bits, numbers.shape[1:]
    rows = numbers.view(fan, STATES // fan // lanes, lanes, *more)
    if fan < lanes and lanes == COARSE_LANES:  # a row's lanes repeat its lanes / fan predecessors
        rows = rows.view(fan, -1, lanes // fan, fan, *more).transpose(2, 3)
    return rows.reshape(fan, -1, lanes, *more).transpose(0, 1).contiguous()


def trellis_encode(
    tiles: Tensor, *, bits: int, codebook: Codebook, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Encode tiles one by one: a Viterbi search over 16-bit states, closed into a circle.

    The result depends on the tile alone: not on the thread count, the other tiles of the call or
    the device or the instruction level. A call cannot be interrupted, so keep it to about a second
    of work (some thousand tiles a core).

    Args:
        tiles: float32 (t, 256), contiguous, in stored order (format page, section 2), on the scale
            of the codebook (unit variance times `codebook.std`), finite. t may be 0.
        bits: bits per weight, 1..8.
        codebook: which values the states have.
        check: whether tiles that are not finite are refused, for which a CUDA device is waited for;
            otherwise they come out as anything.
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
    search = search_table(Codebook(codebook), bits, tiles.device)
    return ops().trellis_encode(
        tiles.contiguous(),
        search.values,
        search.table,
        search.weight_limit,
        search.weight_scale,
        search.gain,
        bits,
        check,
    )


def trellis_encode_reference(tiles: Tensor, *, bits: int, codebook: Codebook) -> Tensor:
    """States int32 (t, 256) by two full laps in float64: a free one that starts half-way round
    fixes the node at position 0, a second starts and ends there. Slow (seconds a tile)."""
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
    costs = [cost]
    for weight in tile:
        edges = costs[-1][:, None] + (values.view(nodes, fan) - weight) ** 2
        costs.append(edges.view(fan, nodes).amin(0))
    node = int(costs[-1].argmin()) if node is None else node
    states = torch.empty(TILE, dtype=torch.int32)
    for position in range(TILE - 1, -1, -1):
        candidates = torch.arange(fan) * nodes + node
        edges = costs[position][candidates >> bits] + (values[candidates] - tile[position]) ** 2
        states[position] = int(candidates[edges.argmin()])
        node = int(states[position]) >> bits
    return states
