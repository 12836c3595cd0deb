"""Drafts from the job's own text: what followed the last time that it read like this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..job import Job

_STEP = 8192  # tokens that one call may take in: about 15 ms
_DEPTH = 32  # suffixes whose latest place is kept up to date; shorter ones keep an earlier place


class SuffixAutomaton:
    """Every substring of a growing text, in linear space.

    A state stands for the substrings that end at the same places; its link leads to the state of
    the longest suffix that ends in more places. So the link of the whole text is the longest
    suffix that occurred before.

    Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring of the state
        self._end = [-1]  # where one of its occurrences ends, the last one excepted
        self._last = 0

    def __len__(self) -> int:
        """Tokens of the text."""
        return self._length[self._last]

    def _new(self, length: int, end: int, link: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1

    def extend(self, token: int) -> None:
        """Add a token to the text; constant time on average."""
        following, link, length = self._next, self._link, self._length
        count = length[self._last]
        self._keep_latest(count - 1)
        new = self._new(count + 1, count, 0, {})
        state, self._last = self._last, new
        while state != -1 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state == -1:
            return
        other = following[state][token]
        if length[state] + 1 == length[other]:
            link[new] = other
            return
        short = self._new(length[state] + 1, self._end[other], link[other], dict(following[other]))
        while state != -1 and following[state].get(token) == other:
            following[state][token] = short
            state = link[state]
        link[other] = link[new] = short

    def _keep_latest(self, end: int) -> None:
        """The text so far ends at `end`: so do the suffixes that occurred before."""
        state = self._link[self._last]
        for _ in range(_DEPTH):
            if state <= 0:
                return
            self._end[state] = end
            state = self._link[state]

    def match(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """The longest suffix of the text and `tail` that occurs earlier in the text.

        Args:
            tail: tokens after the text that are not part of it.
        Returns:
            (its length, place after an earlier occurrence); (0, 0) if there is none.
        """
        state, length = self._last, len(self)
        if not tail:
            state = self._link[state]
            length = 0 if state < 0 else self._length[state]
        for token in tail:
            while state > 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return (length, self._end[state] + 1) if length else (0, 0)


class _Text:
    """The automaton of one job, and its match at this step."""

    def __init__(self) -> None:
        self.known = SuffixAutomaton()
        self.place = 0


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of the current suffix.

    Args:
        match_min: length below which an occurrence says nothing.
        vocab: ids from here on cannot be drawn, and are not proposed.
    """

    def __init__(self, match_min: int, vocab: int) -> None:
        self.match_min = match_min
        self.vocab = vocab

    def admit(self, job: Job) -> None:
        """See `Drafter.admit`."""
        job.draft_state = _Text()

    def start(self, job: Job) -> None:
        """See `Drafter.start`; nothing to do."""

    def follow(self, job: Job) -> None:
        """See `Drafter.follow`. The text is taken in as far as it is final: an automaton cannot
        forget."""
        known, sequence = job.draft_state.known, job.sequence
        ids = sequence.input_ids.numpy()[len(known) : job.final_length(sequence)]
        for token in ids[:_STEP].tolist():
            known.extend(token)

    def can_draft(self, job: Job) -> bool:
        """See `Drafter.can_draft`."""
        self.follow(job)
        text, final = job.draft_state, job.final_length(job.sequence)
        if len(text.known) < final:
            return False
        tail = job.sequence.input_ids.numpy()[final:].tolist()
        length, text.place = text.known.match(tail)
        return length >= self.match_min

    def propose(self, jobs: list[Job], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`. Where the text ends, the draft goes on from its own start: the
        text is then repeating itself."""
        return [self._following(job, count) for job, count in zip(jobs, counts, strict=True)]

    def _following(self, job: Job, count: int) -> list[int]:
        place = job.draft_state.place
        draft: list[int] = job.sequence.input_ids.numpy()[place : place + count].tolist()
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        for i, token in enumerate(draft):
            if not 0 <= token < self.vocab:
                return draft[:i]
        return draft

    def settle(self, job: Job, position: int, window: int, accepted: int) -> None:
        """See `Drafter.settle`; nothing to do."""
