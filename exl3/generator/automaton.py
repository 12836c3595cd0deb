"""One automaton over all stop and banned strings of a job.

Stop strings are compared as they are, banned strings without case. Both are in one trie of folded
characters; where a stop string is met its case is compared with the text.
Source: Aho, Corasick, Efficient string matching (CACM 18, 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


def fold(text: str) -> str:
    """Lower case, one character for one character."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


@dataclass(frozen=True, slots=True)
class Match:
    """A string found at `start` of the text."""

    start: int
    string: str
    banned: bool

    def rank(self) -> tuple[int, int, bool]:
        """The least of several counts: the earliest, then the longest, then the banned one."""
        return self.start, -len(self.string), not self.banned


class Automaton:
    """Immutable: jobs with the same strings share one. Empty strings are ignored."""

    def __init__(self, stops: Iterable[str], banned: Iterable[str]) -> None:
        self.stops = frozenset(s for s in stops if s)
        self.banned = frozenset(fold(s) for s in banned if s)
        self.longest_stop = max(map(len, self.stops), default=0)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends: list[list[tuple[str, bool]]] = [[]]  # strings that end here
        self._stop_starts: list[set[str]] = [set()]  # proper starts of stop strings, with case
        self._banned_start = [False]
        for string in self.stops:
            self._add(string, False)
        for string in self.banned:
            self._add(string, True)
        self._fail = [0] * len(self._next)
        self._shorter = [0] * len(self._next)  # nearest suffix at which a string ends
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _add(self, string: str, banned: bool) -> None:
        node = 0
        for place, char in enumerate(fold(string)):
            if place:
                if banned:
                    self._banned_start[node] = True
                else:
                    self._stop_starts[node].add(string[:place])
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(place + 1)
                self._ends.append([])
                self._stop_starts.append(set())
                self._banned_start.append(False)
            node = self._next[node][char]
        self._ends[node].append((string, banned))

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            fail = self._fail[node]
            self._shorter[node] = fail if self._ends[fail] else self._shorter[fail]
            for char, child in self._next[node].items():
                self._fail[child] = self._step(fail, char) if node else 0
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)


@lru_cache(maxsize=64)
def automaton(stops: frozenset[str], banned: frozenset[str]) -> Automaton:
    """The automaton of these strings, kept for the next job that has the same."""
    return Automaton(stops, banned)


class Scan:
    """Reads the held text of a job as it grows; linear in its length."""

    def __init__(self, strings: Automaton) -> None:
        self.strings = strings
        self.first: Match | None = None
        self._node = self._length = 0

    def reset(self, text: str = "") -> None:
        """Start again, with this text."""
        self.first, self._node, self._length = None, 0, 0
        self.feed(text, text)

    def feed(self, more: str, text: str) -> None:
        """Read the next characters; `first` is then the match that counts.

        Args:
            text: all of it, `more` at its end.
        """
        strings = self.strings
        if not (strings and more):
            return
        node, end = self._node, self._length
        for char in fold(more):
            node, end = strings._step(node, char), end + 1
            found = node
            while found:
                for string, banned in strings._ends[found]:
                    self._note(Match(end - len(string), string, banned), text)
                found = strings._shorter[found]
        self._node, self._length = node, end

    def _note(self, match: Match, text: str) -> None:
        if not match.banned and not text.startswith(match.string, match.start):
            return  # another case
        if self.first is None or match.rank() < self.first.rank():
            self.first = match

    def open_at_end(self, text: str) -> tuple[int | None, int | None]:
        """Where the longest start of a stop string, and of a banned one, begins with which the text
        ends; None if it ends in none."""
        strings, node = self.strings, self._node
        stop: int | None = None
        banned: int | None = None
        while node and (stop is None or banned is None):
            at = self._length - strings._depth[node]
            if banned is None and strings._banned_start[node]:
                banned = at
            starts = strings._stop_starts[node]
            if stop is None and starts and text[at:] in starts:
                stop = at
            node = strings._fail[node]
        return stop, banned
