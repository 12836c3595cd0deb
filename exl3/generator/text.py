"""Text of tokens as they come."""

from __future__ import annotations

from typing import Any

from ..tokenizer.stream import StreamDecoder
from .stream import Decoder


def make_decoder(tokenizer: Any, decode_special_tokens: bool) -> Decoder:
    """A decoder for the tokens of one answer, which continues its prompt."""
    return StreamDecoder(tokenizer, decode_special_tokens=decode_special_tokens, at_start=False)
