"""Checks and derived sizes of a generator."""

from __future__ import annotations

import logging
import numbers
import weakref
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..constants import PAGE_SIZE
from ..errors import ConfigError, UnsupportedError
from ..model.adapters import Chosen
from .pages import PageTable
from .tiers import Tiers

logger = logging.getLogger(__name__)

# The generator that owns the pages of each cache: the one made last.
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


@runtime_checkable
class RunsTokens(Protocol):
    """What a generator needs of a model."""

    config: Any
    caps: dict[str, Any]

    def forward(self, input_ids: Any, params: Any = None) -> Any: ...

    def prefill(self, input_ids: Any, params: Any = None) -> None: ...


@runtime_checkable
class HoldsPages(Protocol):
    """What a generator needs of a cache."""

    model: Any
    max_num_tokens: int

    def copy_page(self, target: Any, from_page: int, to_page: int, num_tokens: int) -> None: ...


@runtime_checkable
class HasPieces(Protocol):
    """What a generator needs of a tokenizer."""

    actual_vocab_size: int

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]: ...


def check_kinds(
    model: Any, cache: Any, tokenizer: Any, draft_model: Any = None, draft_cache: Any = None
) -> None:
    """Raises ConfigError unless each is what its place asks for; the last two may be None."""
    for name, value, kind, wanted in (
        ("model", model, RunsTokens, "Model"),
        ("cache", cache, HoldsPages, "Cache"),
        ("tokenizer", tokenizer, HasPieces, "Tokenizer"),
        ("draft_model", draft_model, RunsTokens, "Model"),
        ("draft_cache", draft_cache, HoldsPages, "Cache"),
    ):
        if value is None and name.startswith("draft"):
            continue
        if not isinstance(value, kind):
            raise ConfigError(
                f"Generator(model, cache, tokenizer): {name} is {type(value).__name__}, expected"
                f" a {wanted}"
            )
    for name, own, owner in (("cache", cache, model), ("draft_cache", draft_cache, draft_model)):
        if own is not None and owner is not None and own.model not in (None, owner):
            raise ConfigError(f"{name} was made for another model: Cache(model, max_num_tokens)")


def check_sizes(**sizes: Any) -> None:
    """Raises ConfigError for a size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name} is {size!r}, expected a whole number of at least 1")


def take_over(cache: Any, generator: Any) -> None:
    """Give the pages of `cache` to `generator`; the one before it is retired."""
    before = _owners.get(cache)
    old = None if before is None else before()
    if old is not None:
        old.retire()
    _owners[cache] = weakref.ref(generator)


def make_table(caches: list[Any], tiers: Tiers) -> PageTable:
    """The pages of caches that share their page numbers, the main one first."""

    def copy(*page: int) -> None:
        for cache in caches:
            cache.copy_page(cache, *page)

    return PageTable(caches[0].max_num_tokens // PAGE_SIZE, copy, tiers=tiers)


def check_model(model: Any, cache: Any, show_visualizer: bool) -> None:
    """Raises ConfigError or UnsupportedError for what a generator cannot run."""
    if not getattr(model, "loaded", True):
        raise ConfigError("the model is not loaded: call model.load() first")
    if cache.max_num_tokens % PAGE_SIZE or cache.max_num_tokens < PAGE_SIZE:
        raise ConfigError(
            f"cache.max_num_tokens is {cache.max_num_tokens}, expected a multiple of {PAGE_SIZE}"
        )
    if model.caps.get("recurrent_states"):
        raise UnsupportedError("models with recurrent state cannot be generated from yet")
    if show_visualizer:
        raise UnsupportedError("show_visualizer: there is no debug window")


def checkpoint_interval(model: Any, wanted: int | None) -> int:
    """Tokens between state checkpoints; only recurrent models make them."""
    interval = wanted or model.caps.get("default_recurrent_checkpoint_interval", 2048)
    if interval % PAGE_SIZE:
        raise ConfigError(
            f"recurrent_checkpoint_interval is {interval}, expected a multiple of {PAGE_SIZE}"
        )
    return int(interval)


def num_columns(model: Any, tokenizer: Any) -> int:
    """Columns of the logits that are tokens: the tokenizer knows them and the model has them."""
    vocab = getattr(model.config, "vocab_size", None)
    known = int(tokenizer.actual_vocab_size)
    return known if vocab is None else min(known, vocab)


def choose_adapters(model: Any, loras: Any) -> Chosen:
    """The adapters of a job that asks for `loras`, see `AdapterSet.choose`."""
    known = getattr(model, "adapters", None)
    if known is not None:
        return known.choose(loras)
    if loras:
        raise UnsupportedError("the job has loras, but the model takes none")
    return ()


class PromptCheck:
    """Checks the ids of prompts against the model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        config = model.config
        self._vocab = getattr(config, "vocab_size", None) or tokenizer.actual_vocab_size
        self._images = bool(model.caps.get("image_input"))
        self._longest = getattr(config, "max_position_embeddings", None)
        self._warned = False

    def __call__(self, job: Any) -> None:
        """Raises:
        ConfigError: an id that is neither in the vocabulary nor of one of the job's embeddings.
        UnsupportedError: embeddings for a model that takes none.
        """
        if job.embeddings and not self._images:
            raise UnsupportedError("the job has embeddings, but the model takes text only")
        for sequence, name in zip(job.sequences, ("prompt", "negative prompt"), strict=False):
            self._check_ids(sequence.input_ids.numpy(), name, job.embeddings)

    def _check_ids(self, ids: NDArray[np.int64], name: str, embeddings: list[Any]) -> None:
        outside = (ids < 0) | (ids >= self._vocab)
        for item in embeddings:
            outside &= (ids < item.first_index) | (ids >= item.last_index)
        if outside.any():
            at = int(outside.argmax())
            raise ConfigError(
                f"{name} token {at} is {int(ids[at])}, expected an id of 0 to {self._vocab - 1}"
                " or of an embedding given with the job"
            )
        if self._longest and ids.size > self._longest and not self._warned:
            self._warned = True
            logger.warning(
                "a prompt of %d tokens is longer than the %d that the model was made for",
                ids.size,
                self._longest,
            )
