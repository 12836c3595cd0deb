"""The compiled core. Loading it registers the ops `torch.ops.exl3.*`."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


class ExtensionMissing(ImportError):
    """The compiled library is not there."""


@cache
def load() -> None:
    """Load the CPU library and, where torch has a CUDA device, the CUDA library; once.

    Raises:
        ExtensionMissing: the CPU library was not built; the message says how to build it.
    """
    import torch

    library = _HERE / "_cpu.so"
    if not library.is_file():
        raise ExtensionMissing(
            f"{library} does not exist: the compiled part of exl3 is not built. In a source tree "
            "run `make build` (or `pip install --no-build-isolation -e .`); it needs a C++20 "
            "compiler and ninja"
        )
    torch.ops.load_library(str(library))
    if has_cuda():
        torch.ops.load_library(str(_HERE / "_cuda.so"))


def has_cuda() -> bool:
    """Whether the CUDA library was built and this machine has a device for it."""
    import torch

    return (_HERE / "_cuda.so").is_file() and torch.cuda.is_available()


@cache
def cuda_digest() -> str:
    """Digest of the CUDA library: kernels of another build may differ in speed."""
    return hashlib.blake2b((_HERE / "_cuda.so").read_bytes(), digest_size=8).hexdigest()
