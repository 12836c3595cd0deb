"""Finding stop strings, banned strings and loops."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ConfigError


def fold(text: str) -> str:
    """Lower case, one character for one character."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


class Matcher:
    """A set of strings, looked for in a growing text. Empty strings are ignored."""

    def __init__(self, strings: Iterable[str]) -> None:
        # Longest first: the pattern takes the first that fits at the earliest place.
        self.strings = sorted({s for s in strings if s}, key=lambda s: (-len(s), s))
        self.longest = len(self.strings[0]) if self.strings else 0
        self._find = re.compile("|".join(re.escape(s) for s in self.strings))

    def __bool__(self) -> bool:
        return bool(self.strings)

    def find(self, text: str) -> tuple[int, str] | None:
        """(place, string) of the earliest complete match; the longest among equals."""
        found = self._find.search(text) if self.strings else None
        return None if found is None else (found.start(), found.group())

    def open_at_end(self, text: str) -> bool:
        """Whether the text ends in the start of a string."""
        for string in self.strings:
            tail = text[-(len(string) - 1) :] if len(string) > 1 else ""
            at = tail.find(string[0])
            while at >= 0:
                if string.startswith(tail[at:]):
                    return True
                at = tail.find(string[0], at + 1)
        return False


class LoopDetector:
    """Finds that the last `window` tokens repeat with some period up to `window // min_reps`."""

    def __init__(self, window: int, min_reps: int) -> None:
        if not 1 < min_reps < window:
            raise ConfigError(
                f"stop_on_loop is ({window}, {min_reps}), expected 1 < min_reps < window"
            )
        self.window = window
        self._periods = np.arange(1, window // min_reps + 1)
        self.reset()

    def reset(self) -> None:
        self._recent = np.full(2 * self.window, -1, np.int64)
        self._count = 0
        self._runs = np.zeros(self._periods.size, np.int64)  # matches in a row, per period

    def push(self, token: int) -> bool:
        """Add a token; True if a loop is complete."""
        slot = self._count % self.window
        # Written twice, so that the last `window` tokens are always one slice.
        end = slot + self.window
        past = self._recent[end - self._periods.size : end][::-1]
        self._runs += 1
        self._runs *= past == token
        self._recent[slot] = self._recent[end] = token
        self._count += 1
        if self._count < self.window:
            return False
        return bool((self._runs >= self.window - self._periods).any())


def split_conditions(conditions: Any, tokenizer: Any) -> tuple[set[int], list[str]]:
    """Stop token ids and stop strings from what the user gave.

    None and empty strings are ignored; a string that is a special token also stops on its id.

    Raises:
        ConfigError: an item that is neither an integer nor a string.
    """
    if conditions is None:
        return set(), []
    if isinstance(conditions, str | numbers.Integral):
        conditions = [conditions]
    tokens: set[int] = set()
    strings: list[str] = []
    for item in conditions:
        if item is None or (isinstance(item, str) and not item):
            continue
        if isinstance(item, numbers.Integral) and not isinstance(item, bool):
            tokens.add(int(item))
        elif isinstance(item, str):
            strings.append(item)
            special = tokenizer.extended_piece_to_id.get(item)
            if special is not None:
                tokens.add(special)
        else:
            raise ConfigError(f"stop_conditions: {item!r} is neither a token id nor a string")
    return tokens, strings
