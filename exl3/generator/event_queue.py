"""The queue between an engine that never waits and a consumer that may have stopped reading."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from .events import Event

MAX_UNREAD = 512  # events kept as they came; later ones are joined
_JOINED_TOKENS = 256  # tokens of one joined event
MAX_UNREAD_BYTES = 256 << 20  # of tensors (logits, probabilities) that nobody has read

_JOINED = {"token_ids": -1, "token_probs": -1, "top_k_tokens": 1, "top_k_probs": 1, "logits": 1}
_PLAIN = {"job", "stage", "eos", "serial", "identifier", "text", *_JOINED}


class EventQueue(asyncio.Queue[Any]):
    """Unbounded as far as the interface goes, yet an abandoned one stays small.

    Up to `MAX_UNREAD` events wait as they came. After that, streaming events are joined as a
    consumer would join them: text and tokens one after another, at most 256 tokens in one event; of
    the progress of a prompt the last counts. Final events are never joined.
    `overflowed` turns true when more than `MAX_UNREAD_BYTES` of tensors wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unread_bytes = 0

    @property
    def overflowed(self) -> bool:
        return self.unread_bytes > MAX_UNREAD_BYTES

    def _put(self, item: Any) -> None:
        waiting = self._queue  # type: ignore[attr-defined]
        self.unread_bytes += _size(item)
        if len(waiting) >= MAX_UNREAD:
            joined = _join(waiting[-1], item)
            if joined is not None:
                waiting[-1] = joined
                return
        super()._put(item)

    def _get(self) -> Any:
        item = super()._get()
        self.unread_bytes -= _size(item)
        return item

    def clear(self) -> None:
        """Drop everything that waits."""
        while not self.empty():
            self.get_nowait()


def _size(item: Any) -> int:
    if not isinstance(item, dict):
        return 0
    return sum(value.nbytes for value in item.values() if isinstance(value, Tensor))


def _join(old: Any, new: Any) -> Event | None:
    """Both as one event, or None if they must stay apart."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or old["eos"] or new["eos"]:
        return None
    if old["stage"] != new["stage"]:
        return None
    if new["stage"] == "prefill":
        return None if "prompt_token_ids" in old else new
    if new["stage"] != "streaming" or not (old.keys() <= _PLAIN and new.keys() <= _PLAIN):
        return None
    if "token_ids" in old and old["token_ids"].shape[-1] >= _JOINED_TOKENS:
        return None
    out = {**old, **new}
    if "text" in old:
        out["text"] = old["text"] + new.get("text", "")
    for key, dim in _JOINED.items():
        if key in old and key in new:
            out[key] = torch.cat([old[key], new[key]], dim)
    return out
