"""Text from tokens that arrive one at a time."""

from __future__ import annotations

import codecs
from typing import Protocol

from .pieces import Lead, PieceTable


class HasPieces(Protocol):
    """A tokenizer, as far as this module needs it."""

    @property
    def piece_table(self) -> PieceTable: ...


class StreamDecoder:
    """Decodes a sequence token by token.

    What `push` and `flush` return, joined, equals `decode` of all the tokens at once. Bytes of an
    incomplete character are held until it completes or cannot complete any more, so no U+FFFD is
    shown that the whole text lacks. Constant work per token.

    Args:
        tokenizer: an exl3 `Tokenizer`.
        decode_special_tokens: show special tokens as their text.
        at_start: whether the first token starts a text. False for the continuation of a prompt:
            SentencePiece vocabularies then keep the space in front of the first word.
    """

    def __init__(
        self,
        tokenizer: HasPieces,
        *,
        decode_special_tokens: bool = False,
        at_start: bool = True,
    ) -> None:
        self._table = tokenizer.piece_table
        self._decode_special = decode_special_tokens
        self._at_start = at_start and self._table.lead is not Lead.KEEP
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def held(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        table = self._table
        if not table.shown(token, decode_special=self._decode_special):
            return ""
        if self._at_start:
            data = table.first_bytes(token)
            # A leading space is dropped from the text, not from an empty first piece.
            self._at_start = table.lead is Lead.DROP_ONE and not table.bytes[token]
        else:
            data = table.bytes[token]
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End of the text: bytes that never completed a character, as U+FFFD."""
        return self._utf8.decode(b"", True)
