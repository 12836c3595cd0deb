"""Giving memory back."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def free_mem() -> None:
    """Collect garbage, give freed pages back to the system, empty the caches of CUDA devices."""
    gc.collect()
    trim_heap()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give freed pages of the C heap back to the system; does nothing without glibc.

    One small live block at the end of the heap otherwise keeps a whole model's memory resident.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
