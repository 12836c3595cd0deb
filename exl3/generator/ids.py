"""A growing list of token ids."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class IdBuffer:
    """Token ids in one growing host buffer, so that a view costs no copy."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self._buffer = np.empty(max(256, 2 * ids.size), np.int64)
        self._buffer[: ids.size] = ids
        self.length = ids.size

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> None:
        if self.length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.length] = token
        self.length += 1

    def last(self) -> int:
        return int(self._buffer[self.length - 1])

    def truncate(self, length: int) -> None:
        self.length = length

    def numpy(self) -> NDArray[np.int64]:
        """A view (n,), valid until the next change."""
        return self._buffer[: self.length]

    def torch(self) -> Tensor:
        """A view (1, n), valid until the next change."""
        return torch.from_numpy(self._buffer[: self.length]).unsqueeze(0)
