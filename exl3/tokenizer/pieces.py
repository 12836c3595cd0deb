"""The bytes behind every token id, and how they join into text.

Text is the concatenation of the bytes of its tokens, decoded as UTF-8 with every ill-formed part
replaced by U+FFFD, after one rule about the start of the text. This holds for byte-level BPE and
for SentencePiece-style vocabularies, and it is what makes streaming exact: bytes can be joined one
token at a time. The decoder description of tokenizer.json is reduced to it here.

A difference to the `tokenizers` library: where byte tokens (`<0x..>`) do not form valid UTF-8, it
replaces every byte of the whole run; here the valid characters of the run are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ..errors import UnsupportedError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Lead(Enum):
    """What happens to space at the start of a decoded text."""

    KEEP = auto()
    DROP_ONE = auto()  # one leading space is dropped
    FIRST_PIECE = auto()  # the first token loses all its space marks


@cache
def byte_of_char() -> Mapping[str, int]:
    """Byte-level BPE spells bytes as characters: printable ones as themselves, others from U+0100.

    Source: GPT-2's vocabulary.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def byte_level(piece: str) -> bytes:
    """The bytes that a byte-level piece spells; other text as UTF-8."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


class PieceRules:
    """How a tokenizer's decoder turns pieces into bytes; from its entry in tokenizer.json."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self.lead = Lead.KEEP
        self.space_mark = "▁"
        self._replace: list[Callable[[str], str]] = []
        self._byte_level = False
        self._byte_fallback = False
        if decoder is None:
            raise UnsupportedError("tokenizer.json has no decoder; expected ByteLevel or Metaspace")
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        for step in steps:
            self._add(step)

    @classmethod
    def of(cls, tokenizer: HfTokenizer) -> PieceRules:
        decoder = tokenizer.decoder
        return cls(None if decoder is None else json.loads(decoder.__getstate__()))

    def _add(self, step: Mapping[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Fuse":
            pass
        elif kind == "Replace":
            self._replace.append(_replacer(step["pattern"], step["content"]))
        elif kind == "Metaspace":
            mark = self.space_mark = step.get("replacement", "▁")
            self._replace.append(lambda text: text.replace(mark, " "))
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            if not never:
                self.lead = Lead.FIRST_PIECE
        elif kind == "Strip" and step.get("content") == " " and not step.get("stop"):
            if step.get("start", 0) > 1:
                raise UnsupportedError("tokenizer.json: a decoder that strips several spaces")
            self.lead = Lead.DROP_ONE if step.get("start") else self.lead
        else:
            raise UnsupportedError(
                f"tokenizer.json: decoder step {kind!r}; known are ByteFallback, ByteLevel, Fuse, "
                "Metaspace, Replace, Sequence and Strip of a leading space"
            )

    def is_byte_token(self, piece: str) -> bool:
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(piece) is not None

    def bytes_of(self, piece: str, *, added: bool) -> bytes:
        """The bytes of a piece; `added` tokens are plain text, not spelt in byte characters."""
        for replace in self._replace:
            piece = replace(piece)
        if self.is_byte_token(piece):
            return bytes([int(piece[3:5], 16)])
        if self._byte_level and not added:
            return byte_level(piece)
        return piece.encode("utf-8", "replace")


def _replacer(pattern: Mapping[str, str], content: str) -> Callable[[str], str]:
    if "String" in pattern:
        literal = pattern["String"]
        return lambda text: text.replace(literal, content)
    compiled = re.compile(pattern["Regex"])
    return lambda text: compiled.sub(lambda _: content, text)


class PieceTable:
    """Every id's piece and bytes.

    Args:
        pieces: raw piece of every id; gaps in the ids may be left out.
        added: ids of added tokens.
        special: ids that decode to nothing unless asked for.
    """

    def __init__(
        self,
        rules: PieceRules,
        pieces: Mapping[int, str],
        *,
        added: Iterable[int],
        special: Iterable[int],
    ) -> None:
        self.size = max(pieces, default=-1) + 1
        self.lead = rules.lead
        self.special = frozenset(special)
        self.byte_tokens = frozenset(i for i, p in pieces.items() if rules.is_byte_token(p))
        self._pieces = pieces
        self._mark = rules.space_mark
        self._rules = rules
        self._added = frozenset(added)
        self.bytes: list[bytes] = [b""] * self.size
        for i, piece in pieces.items():
            self.bytes[i] = rules.bytes_of(piece, added=i in self._added)

    def shown(self, token: int, *, decode_special: bool) -> bool:
        """Whether an id gives text. Ids outside the table (padding, embeddings) never do."""
        return 0 <= token < self.size and (decode_special or token not in self.special)

    def first_bytes(self, token: int) -> bytes:
        """The bytes of a token at the very start of a text."""
        if self.lead is Lead.FIRST_PIECE:
            piece = self._pieces.get(token, "").replace(self._mark, "")
            return self._rules.bytes_of(piece, added=token in self._added)
        data = self.bytes[token]
        return data[1:] if self.lead is Lead.DROP_ONE and data.startswith(b" ") else data

    def decode(self, ids: Sequence[int], *, decode_special: bool) -> str:
        """The text of a whole sequence."""
        shown = [i for i in ids if self.shown(i, decode_special=decode_special)]
        if self.lead is Lead.FIRST_PIECE and shown:
            data = self.first_bytes(shown[0]) + b"".join([self.bytes[i] for i in shown[1:]])
        else:
            data = b"".join([self.bytes[i] for i in shown])
            if self.lead is Lead.DROP_ONE and data.startswith(b" "):
                data = data[1:]
        return data.decode("utf-8", "replace")

    def texts(self, *, decode_special: bool) -> list[str]:
        """The text of every id on its own, spaces at its start kept."""
        return [
            data.decode("utf-8", "replace") if decode_special or i not in self.special else ""
            for i, data in enumerate(self.bytes)
        ]
