"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .stream import Decoder


class WholeTextDecoder:
    """Decodes all tokens again at every step: right for any tokenizer, slow for long texts."""

    def __init__(self, decode: Callable[[torch.Tensor], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0
        self.pending = False

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(torch.tensor(self._ids))
        self.pending = text.endswith("\ufffd")
        if self.pending:
            return ""
        return self._new(text)

    def flush(self) -> str:
        self.pending = False
        return self._new(self._decode(torch.tensor(self._ids))) if self._ids else ""

    def _new(self, text: str) -> str:
        new = text[self._given :]
        self._given = len(text)
        return new


def make_decoder(tokenizer: Any, decode_special_tokens: bool) -> Decoder:
    """A decoder for the tokens of one answer."""
    return WholeTextDecoder(
        lambda ids: tokenizer.decode(ids, decode_special_tokens=decode_special_tokens)
    )
