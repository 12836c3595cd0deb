"""What a user gave as stop conditions; finding loops."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError


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


def loop_rule(stop_on_loop: Any) -> tuple[int, int] | None:
    """Window and least repetitions, checked.

    Raises:
        ConfigError: not a pair, or not 1 < min_reps < window.
    """
    if stop_on_loop is None:
        return None
    try:
        window, min_reps = stop_on_loop
        LoopDetector(window, min_reps)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stop_on_loop is {stop_on_loop}, expected (window, min_reps)") from error
    return window, min_reps


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
    if isinstance(conditions, bytes | Mapping) or not isinstance(conditions, Iterable):
        raise ConfigError(f"stop_conditions is {conditions!r:.60}, expected token ids and strings")
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
