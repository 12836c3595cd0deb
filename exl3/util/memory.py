"""Giving memory back."""

from __future__ import annotations

import gc

import torch


def free_mem() -> None:
    """Collect garbage and empty the caches of CUDA devices in use."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
