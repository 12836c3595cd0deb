"""Which of its kernels `linear` takes on a CUDA device: what there is to choose, and choosing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .codebook import Codebook
from .linear import LinearWeight
from .registry import ops

PATHS = ("built_in", "small", "decoded", "direct", "even")
"""`small`: straight from the trellis, 16 rows a launch; `decoded`: weights decoded, then multiplied
by a library; `direct`: straight from the trellis by the tensor cores of Hopper GPUs; `even`: a
few rows, in equal shares for all multiprocessors."""
ROW_RANGES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256))
"""First and last row count that share a choice."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to run. `cluster`: thread blocks that share outputs, of paths `small` and `direct`;
    thread blocks a multiprocessor, of path `even`; 0: as the built-in rule says."""

    path: str
    cluster: int = 0


BUILT_IN = Route("built_in")


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """What a choice depends on, besides the device and the number of rows. Sizes are padded."""

    k: int
    bits: int
    codebook: Codebook
    gated: bool
    n: tuple[int, ...]

    @staticmethod
    def of(weights: Sequence[LinearWeight], *, gated: bool) -> LinearProblem | None:
        """The problem of a group; None for unlike rates or codebooks, which run one by one."""
        first = weights[0]
        bits = first.planes.shape[2] // 16
        if any((w.planes.shape[2] // 16, w.codebook) != (bits, first.codebook) for w in weights):
            return None
        sizes = tuple(w.svh.shape[0] for w in weights)
        return LinearProblem(first.suh.shape[0], bits, first.codebook, gated, sizes)

    def text(self) -> str:
        """One word a field: `k=4096 n=4096+1024+1024 bits=4 mul1`."""
        sizes = "+".join(map(str, self.n))
        gated = " gated" if self.gated else ""
        return f"k={self.k} n={sizes} bits={self.bits} {self.codebook.label}{gated}"

    def _numbers(self) -> list[int]:
        return [self.k, self.bits, int(self.codebook), int(self.gated), *self.n]

    def routes(self, device_index: int, rows: int) -> list[Route]:
        """All ways to run this many rows on a CUDA device, `BUILT_IN` first."""
        flat = ops().linear_routes(device_index, rows, self._numbers())
        return [
            Route(PATHS[path], cluster) for path, cluster in zip(flat[::2], flat[1::2], strict=True)
        ]

    def take(self, device_index: int, rows: tuple[int, int], route: Route) -> None:
        """Run these rows (first, last) of the problem so from now on, in this process. What was
        captured before stays as it is.

        Raises:
            ConfigError: no such path.
        """
        if route.path not in PATHS:
            raise ConfigError(f"path is {route.path!r}, expected one of {', '.join(PATHS)}")
        path = PATHS.index(route.path)
        ops().set_linear_route(device_index, self._numbers(), *rows, path, route.cluster)


def clear_routes() -> None:
    """Go back to the built-in rules on all devices."""
    ops().clear_linear_routes()
