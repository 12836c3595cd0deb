"""DRY: a penalty on tokens that would go on repeating what was said before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .base import SS_Base
from .penalties import _length
from .state import Row
from .steps import FLOAT32_MAX, SS_NoOp, _LogitStep, _number

DEFAULT_BREAKERS = ("\n", ":", '"', "*")

_ids_by_breakers: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], NDArray[np.int64]]] = (
    weakref.WeakKeyDictionary()
)


class SS_DRY(_LogitStep):
    """Don't Repeat Yourself.

    Let n be the length of the longest end of the text that occurred before, followed by token t.
    If n >= `allowed_length`, then l_t <- l_t - multiplier * base^(n - allowed_length). A breaker
    ends every match; a token that is itself a breaker is never penalised. Linear in the length of
    the text.

    Args:
        multiplier: 0 and up; 0 is off.
        base: 1 and up.
        allowed_length: longest repetition that costs nothing, plus one; 1 and up.
        range: newest tokens that are looked at; 0: all.
        sequence_breakers: token ids and strings; a string stands for every token whose text has it
            in it. None: newline, colon, quotation mark, asterisk.
        tokenizer: needed for strings; without it the default breakers are left out.
    Raises:
        ConfigError: a value outside its range, or strings without a tokenizer.
    Source: "DRY: a modern repetition penalty", text-generation-webui pull request 5677, with the
    exponent limited by what float32 holds instead of to 50 tokens.
    """

    def __init__(
        self,
        multiplier: float = 0.0,
        base: float = 1.75,
        allowed_length: int = 2,
        range: int = 0,
        sequence_breakers: Iterable[str | int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.multiplier = _number(self, "multiplier", multiplier)
        self.base = _number(self, "base", base)
        self.allowed_length = _length(self, "allowed_length", allowed_length)
        self.range = _length(self, "range", range)
        if self.multiplier < 0.0 or self.base < 1.0 or self.allowed_length < 1:
            raise ConfigError(
                f"SS_DRY: multiplier {multiplier}, base {base}, allowed_length {allowed_length}: "
                "expected at least 0, 1 and 1"
            )
        if sequence_breakers is None:
            sequence_breakers = () if tokenizer is None else DEFAULT_BREAKERS
        elif isinstance(sequence_breakers, str):
            sequence_breakers = (sequence_breakers,)
        elif not isinstance(sequence_breakers, Iterable):
            raise ConfigError(
                f"SS_DRY: sequence_breakers is {sequence_breakers!r}, expected ids and strings"
            )
        self.breakers = _breaker_ids(list(sequence_breakers), tokenizer)

    def alt(self) -> SS_Base | None:
        return SS_NoOp() if self.multiplier == 0.0 else None

    def reqs_past_ids(self) -> bool:
        return True

    def apply(self, row: Row) -> None:
        if row.past_ids is None:
            return
        past = row.past_ids[-self.range :] if self.range else row.past_ids
        tokens, lengths = self.matches(past)
        inside = (tokens >= 0) & (tokens < row.logits.size)
        tokens, lengths = tokens[inside], lengths[inside]
        if not tokens.size:
            return
        longest = np.zeros(row.logits.size, np.int64)
        np.maximum.at(longest, tokens, lengths)
        tokens = np.flatnonzero(longest)
        with np.errstate(over="ignore"):
            penalty = self.multiplier * self.base ** (longest[tokens] - self.allowed_length)
            row.own()[tokens] -= np.minimum(penalty, FLOAT32_MAX).astype(np.float32)

    def matches(self, past: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that followed an earlier occurrence of the end of `past`, and how long that end
        is; only occurrences of `allowed_length` tokens or more."""
        none = np.zeros(0, np.int64), np.zeros(0, np.int64)
        least = self.allowed_length
        limit = self._unbroken(past)
        if past.size <= least or limit < least:
            return none
        # Places of an earlier last token: most texts have none that goes on far enough.
        at = np.flatnonzero(past[least - 1 : -1] == past[-1]) + least - 1
        for back in range(1, least):
            at = at[past[at - back] == past[-1 - back]]
        at = at[~np.isin(past[at + 1], self.breakers)]
        if not at.size:
            return none
        lengths = _short_matches(past, at, least, limit)
        if lengths is None:
            common = _common_starts(past[::-1].tolist())
            lengths = np.array([common[past.size - 1 - place] for place in at.tolist()], np.int64)
        return past[at + 1], np.minimum(lengths, limit)

    def _unbroken(self, past: NDArray[np.int64]) -> int:
        """Tokens after the last breaker."""
        if not self.breakers.size:
            return past.size
        places = np.flatnonzero(np.isin(past, self.breakers))
        return past.size - 1 - int(places[-1]) if places.size else past.size


def _short_matches(
    past: NDArray[np.int64], at: NDArray[np.int64], least: int, limit: int
) -> NDArray[np.int64] | None:
    """Lengths of the matches that end at the places `at`, `least` known, as far as `limit`. None:
    some are so long, or so many, that all places together are better dealt with."""
    lengths = np.full(at.size, least, np.int64)
    going, work = np.arange(at.size), 0
    for length in range(least, limit):
        going = going[at[going] >= length]
        going = going[past[at[going] - length] == past[-1 - length]]
        if not going.size:
            break
        lengths[going] = length + 1
        work += going.size + 256
        if work > past.size:
            return None
    return lengths


def _common_starts(items: Sequence[int]) -> list[int]:
    """For every place, the length of the longest common start of `items` and `items[place:]`.

    Source: the Z algorithm (Gusfield, Algorithms on Strings, Trees and Sequences, 1997, 1.4).
    """
    size = len(items)
    z = [0] * size
    z[0] = size
    left = right = 0  # the match that reaches furthest
    for i in range(1, size):
        k = min(right - i, z[i - left]) if i < right else 0
        if i + k >= right:
            while i + k < size and items[k] == items[i + k]:
                k += 1
            left, right = i, i + k
        z[i] = k
    return z


def _breaker_ids(breakers: list[str | int], tokenizer: Any) -> NDArray[np.int64]:
    ids = [int(item) for item in breakers if not isinstance(item, str)]
    strings = tuple(sorted({item for item in breakers if isinstance(item, str) and item}))
    if strings and tokenizer is None:
        raise ConfigError(f"SS_DRY: sequence_breakers {strings} are text: give the tokenizer too")
    found = _with_strings(strings, tokenizer) if strings else np.zeros(0, np.int64)
    return np.union1d(np.array(ids, np.int64), found)


def _with_strings(strings: tuple[str, ...], tokenizer: Any) -> NDArray[np.int64]:
    """Ids whose text contains one of the strings; kept per tokenizer."""
    known = _ids_by_breakers.setdefault(tokenizer, {})
    if strings not in known:
        pieces = tokenizer.get_id_to_piece_list(True)
        found = [i for i, piece in enumerate(pieces) if any(s in piece for s in strings)]
        known[strings] = np.array(found, np.int64)
    return known[strings]
