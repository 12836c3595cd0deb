"""Counter-based random numbers: the number of a token depends on the draw's key and on the token
alone, so a seed gives the same result in any batch and whatever other tokens were cut away."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)

# Range of the Gumbel noise that 53-bit uniforms can give: a token this far below the best one,
# or further, can never win.
GUMBEL_SPAN = 42.0


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & _MASK
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & _MASK
    return z ^ (z >> 31)


def uniforms(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in (0, 1) for each id.

    Source: SplitMix64 (Steele, Lea, Flood 2014), entered at counter `id` of the stream `key`.
    """
    start = np.uint64(_mix(((key & 0xFFFFFFFF) * int(_GAMMA) + int(_MIX_2)) & _MASK))
    z = ids.astype(np.uint64)
    z += np.uint64(1)
    z *= _GAMMA
    z += start
    z ^= z >> _S30
    z *= _MIX_1
    z ^= z >> _S27
    z *= _MIX_2
    z ^= z >> _S31
    z >>= _S11
    u = z.astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    return u


def gumbel(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise -ln(-ln u) for each id."""
    g = uniforms(key, ids)
    np.log(g, out=g)
    np.negative(g, out=g)
    np.log(g, out=g)
    np.negative(g, out=g)
    return g
