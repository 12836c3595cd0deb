"""From sampled tokens to released text: what may be shown, what is held back, when to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .automaton import Automaton, Scan
from .stops import LoopDetector


class Decoder(Protocol):
    """Turns tokens into text as they come."""

    @property
    def held(self) -> bool:
        """Whether the tokens so far end inside a character."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """The text of an incomplete character at the end."""


@dataclass(slots=True)
class Token:
    """A sampled token and what is to be reported about it."""

    id: int
    text: str = ""
    open: bool = False  # ends inside a character
    prob: float | None = None
    top: tuple[Any, Any] | None = None  # ids long (1, 1, k), probabilities (1, 1, k)
    logits: torch.Tensor | None = None  # (1, 1, V_pad)
    memory: Any = None  # of the sampler, before it drew the token


@dataclass(slots=True)
class Outcome:
    """What a token led to."""

    released: list[Token] = field(default_factory=list)
    text: str = ""
    reason: str | None = None  # of the end
    details: dict[str, Any] = field(default_factory=dict)  # eos_triggering_*
    held: list[Token] = field(default_factory=list)  # with a reason: never released
    held_text: str = ""
    suppressed: list[Token] | None = None  # cut out, a banned string
    suppressed_text: str = ""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """What ends or holds back the text of a job."""

    stop_tokens: frozenset[int]
    strings: Automaton
    loop: tuple[int, int] | None = None


class TextStream:
    """Holds the tokens of one job that are not released yet.

    Args:
        make_decoder: a new decoder, at the start and after a rewind.
        token_str: text of a token with specials shown.
        healed: text at the start that the prompt already has.
    """

    def __init__(
        self,
        rules: StreamRules,
        make_decoder: Callable[[], Decoder],
        token_str: Callable[[int], str],
        healed: str = "",
    ) -> None:
        self.rules = rules
        self.held: list[Token] = []
        self.completion: list[str] = []
        self._make_decoder = make_decoder
        self._decoder = make_decoder()
        self._token_str = token_str
        self._healed = healed
        self._unhealed = healed  # what of it is still to be cut off
        self._tokens: list[int] = []  # all of them: to start again after a rewind
        self._text = ""  # of the held tokens
        self._stuck = 0  # tokens in a row that ended inside a character
        self._scan = Scan(rules.strings)
        self._loop = LoopDetector(*rules.loop) if rules.loop else None

    def push(self, token: Token, *, limit: bool, filter_done: bool) -> Outcome:
        """Add a sampled token and apply the rules, the first that fits.

        Args:
            limit: this is the last token that the job may have.
            filter_done: a filter that ends the job is complete.
        """
        rules = self.rules
        if token.id in rules.stop_tokens:
            return self._end_on_token(token)
        self._add(token)
        looped = self._loop is not None and self._loop.push(token.id)
        found = self._scan.first
        if found is not None and found.banned:
            return self._suppress(found.start)
        if limit:
            return self._release("max_new_tokens", flush=True)
        if filter_done:
            return self._release("end_filter", flush=True)
        if token.open and self._stuck <= 20 + rules.strings.longest_stop:
            return Outcome()
        open_stop, open_banned = self._scan.open_at_end(self._text)
        if found is not None and (open_banned is None or open_banned >= found.start):
            return self._end_on_string(found.start, found.string)
        if open_stop is not None or open_banned is not None:
            return Outcome()
        return self._release("loop_detected" if looped else None, flush=looped)

    def finish(self, reason: str) -> Outcome:
        """Release everything, for an end that no token caused."""
        return self._release(reason, flush=True)

    def full_completion(self) -> str:
        return "".join(self.completion)

    def _add(self, token: Token) -> None:
        self._tokens.append(token.id)
        token.text = self._heal(self._decoder.push(token.id))
        token.open = self._decoder.held
        self.held.append(token)
        self._text += token.text
        self._scan.feed(token.text, self._text)
        self._stuck = self._stuck + 1 if token.open else 0

    def _heal(self, text: str) -> str:
        if self._unhealed and text:
            cut = min(len(self._unhealed), len(text))
            self._unhealed, text = self._unhealed[cut:], text[cut:]
        return text

    def _release(self, reason: str | None, *, flush: bool) -> Outcome:
        """Give out what is held; with `flush`, an incomplete character at the end as it is."""
        if flush:
            self._text += self._heal(self._decoder.flush())
        out = Outcome(self.held, self._text, reason)
        if self._text:
            self.completion.append(self._text)
        self.held, self._text, self._stuck = [], "", 0
        self._scan.reset()
        return out

    def _end_on_token(self, token: Token) -> Outcome:
        out = self._release("stop_token", flush=True)
        token.text = self._token_str(token.id)
        out.held, out.held_text = [token], token.text
        out.details = {
            "eos_triggering_token_id": token.id,
            "eos_triggering_token_str": token.text,
        }
        return out

    def _end_on_string(self, at: int, string: str) -> Outcome:
        self._text, rest = self._text[:at], self._text[at:]
        out = self._release("stop_string", flush=False)
        out.held_text = rest
        out.details = {"eos_triggering_string": string}
        return out

    def _suppress(self, at: int) -> Outcome:
        """Take back the tokens from the one in which the text at `at` began."""
        first, start = 0, 0
        while start + len(self.held[first].text) <= at:
            start += len(self.held[first].text)
            first += 1
        if at == start:  # the first bytes of the character may be in earlier tokens
            while first > 0 and self.held[first - 1].open:
                first -= 1
                start -= len(self.held[first].text)
                if self.held[first].text:
                    break
        cut = self.held[first:]
        self.held = self.held[:first]
        self._text, gone = self._text[:start], self._text[start:]
        self._scan.reset(self._text)
        self._restart(len(self._tokens) - len(cut))
        return Outcome(suppressed=cut, suppressed_text=gone)

    def _restart(self, count: int) -> None:
        """Bring decoder and loop detector to the state after the first `count` tokens."""
        del self._tokens[count:]
        self._decoder = self._make_decoder()
        self._unhealed = self._healed
        self._stuck = 0
        for token in self._tokens:
            self._heal(self._decoder.push(token))
        if self._loop is not None:
            self._loop.reset()
            for token in self._tokens[-2 * self._loop.window :]:
                self._loop.push(token)
