"""Small helpers of programs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError


class Timer:
    """Context manager; `interval` is the seconds spent inside."""

    def __init__(self) -> None:
        self.interval = 0.0
        self._start = 0.0

    def __enter__(self) -> Timer:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.interval = time.perf_counter() - self._start


def cuda_sync_active() -> None:
    """Wait for all CUDA devices in use; nothing without one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def prepend_hf_chat_context(
    tokenizer: Any, tokens: Tensor, mode: str = "generation", prompt: str = "Say something."
) -> Tensor:
    """Put one turn of the model's chat template before `tokens` (b, n).

    Args:
        mode: `generation`: the tokens are an answer to `prompt`.
    """
    if mode != "generation":
        raise ConfigError(f"mode is {mode!r}, expected 'generation'")
    context = tokenizer.hf_chat_template([{"role": "user", "content": prompt}])
    return torch.cat([context.expand(tokens.shape[0], -1), tokens], dim=-1)
