"""`Module`: a part of a model that has a key, loads its tensors and runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import FormatError
from .batch import Batch

if TYPE_CHECKING:
    from ..loader.base import TensorSource


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where weights go, and how plain ones are held, see `InferParams.plain_dtype`."""

    plain_dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")


class Module(ABC):
    """Base of all modules. `key` is the tensor-name prefix; activations are (m, hidden), float32 on
    the CPU and float16 on CUDA."""

    def __init__(self, key: str) -> None:
        self.key = key

    def children(self) -> list[Module]:
        """Direct parts, in the order they run."""
        return []

    def __iter__(self) -> Iterator[Module]:
        yield self
        for child in self.children():
            yield from child

    def load(self, stc: TensorSource, options: LoadOptions | None = None) -> None:
        """Load all tensors below this module; harmless where they are loaded.

        Raises:
            FormatError: a tensor is missing or has the wrong shape or dtype.
        """
        for child in self.children():
            child.load(stc, options)

    def unload(self) -> None:
        """Drop all tensors; harmless where there are none."""
        for child in self.children():
            child.unload()

    @property
    def loaded(self) -> bool:
        """True once every part has its tensors."""
        return all(child.loaded for child in self.children())

    def stored_bytes(self, stc: TensorSource) -> int:
        """Bytes of this module's tensors in the files, from headers alone."""
        return sum(child.stored_bytes(stc) for child in self.children())

    def label(self) -> str:
        """One line for the layout tree, without the key."""
        return type(self).__name__

    @abstractmethod
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(m, in) -> (m, out)."""


def read_tensor(stc: TensorSource, key: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor by its full name, of exactly this shape.

    Raises:
        FormatError: missing, or another shape; names tensor, expected and actual.
    """
    if not stc.has(key):
        raise FormatError(f"tensor {key} is missing, expected shape {shape}")
    actual = tuple(stc.info(key).shape)
    if actual != shape:
        raise FormatError(f"tensor {key} has shape {actual}, expected {shape}")
    return stc.get(key)


FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def read_float(stc: TensorSource, key: str, shape: tuple[int, ...]) -> Tensor:
    """`read_tensor` for weights: float16, bfloat16 or float32.

    Raises:
        FormatError: as `read_tensor`, or another dtype.
    """
    tensor = read_tensor(stc, key, shape)
    if tensor.dtype not in FLOAT_DTYPES:
        raise FormatError(f"tensor {key} is {tensor.dtype}, expected float16, bfloat16 or float32")
    return tensor
