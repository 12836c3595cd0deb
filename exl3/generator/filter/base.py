"""The base class of filters."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import ConfigError, Exl3Error


class FilterError(Exl3Error):
    """A filter failed; the text is its own."""


@contextmanager
def filter_faults() -> Iterator[None]:
    """Whatever goes wrong inside is a fault of a filter."""
    try:
        yield
    except Exception as error:
        raise FilterError(str(error) or type(error).__name__) from error


@runtime_checkable
class HasVocabulary(Protocol):
    """What a filter needs of a tokenizer."""

    actual_vocab_size: int


class Filter(ABC):
    """Says at each step which tokens are allowed.

    With a `trigger_token` it is inactive until that id is sampled, then reset and active. When its
    end is reached it ends the job (`eos_after_completed`), or goes inactive until triggered again.
    One filter serves one job at a time.
    """

    logits_dtype = torch.float16

    def __init__(
        self,
        tokenizer: Any,
        trigger_token: int | None = None,
        prefix_str: str | None = None,
        eos_after_completed: bool = False,
    ) -> None:
        if not isinstance(tokenizer, HasVocabulary):
            raise ConfigError(
                f"{type(self).__name__}: tokenizer is {type(tokenizer).__name__}, expected a"
                " Tokenizer"
            )
        if trigger_token is not None and not isinstance(trigger_token, numbers.Integral):
            raise ConfigError(
                f"{type(self).__name__}: trigger_token is {trigger_token!r}, expected a token id;"
                " tokenizer.single_id(text) gives it"
            )
        self.tokenizer: Any = tokenizer
        self.trigger_token = trigger_token
        self.prefix_str = prefix_str
        self.eos_after_completed = eos_after_completed
        self.is_active = trigger_token is None
        self.vocab_size = tokenizer.actual_vocab_size
        self.job: Any = None
        self.generator: Any = None
        self._journal: list[tuple[int, bool, bool]] = []  # id, was active, is active

    @abstractmethod
    def reset(self) -> None:
        """To the initial state."""

    @abstractmethod
    def accept_token(self, token: int) -> None:
        """Advance by an allowed id."""

    @abstractmethod
    def get_next_logit_mask(self) -> Tensor:
        """Host tensor: additive float16 (1, w) of 0 or -inf, or packed int32 (1, ceil(w/32)), bit
        `i & 31` of word `i >> 5` set = allowed. Ids beyond are masked."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the end is reached."""

    def use_background_worker(self) -> bool:
        """Whether the mask may be computed in a thread while the model runs."""
        return True

    def rollback_tokens(self, count: int) -> bool:
        """Take back the last accepted ids; False: cannot, replay instead."""
        return False

    def attach(self, job: Any) -> None:
        """Serve this job from now on.

        Raises:
            ConfigError: it serves another job that is not finished.
        """
        if self.job is not None and self.job is not job and self.job.is_running():
            raise ConfigError(
                f"{type(self).__name__} serves another job; give every job its own filter"
            )
        self.job = job
        self.generator = job.generator
        self.is_active = self.trigger_token is None
        self._journal.clear()
        self.reset()

    def detach(self) -> None:
        """The job has ended."""
        self.job = self.generator = None

    def feed(self, token: int) -> bool:
        """Take note of a sampled id; True if the job must end."""
        was_active = self.is_active
        done = False
        if was_active:
            self.accept_token(token)
            if self.is_completed():
                done = self.eos_after_completed
                self.is_active = False
        elif token == self.trigger_token:
            self.reset()
            self.is_active = True
        self._journal.append((token, was_active, self.is_active))
        return done

    def rewind(self, count: int) -> None:
        """Take back the last `count` ids fed."""
        if not count:
            return
        undone = self._journal[-count:]
        del self._journal[-count:]
        only_accepts = all(before and after for _, before, after in undone)
        if only_accepts and self.rollback_tokens(count):
            return
        self.reset()
        self.is_active = self.trigger_token is None
        for token, was_active, is_active in self._journal:
            if was_active:
                self.accept_token(token)
            elif is_active:
                self.reset()
            self.is_active = is_active
