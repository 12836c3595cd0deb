"""From the generator's arguments to a `Speculation`."""

from __future__ import annotations

import numbers
from typing import Any

from ...errors import ConfigError, UnsupportedError
from .length import DraftOptions
from .model import ModelDrafter
from .ngram import NgramDrafter
from .speculation import Speculation
from .vocabulary import check_vocabularies

_DEFAULT_TOKENS = 4


def draft_options(draft_model: Any, num_draft_tokens: int | None, *rest: Any) -> DraftOptions:
    """The options of a generator; None: the length that the draft model was made for, or 4.

    Args:
        rest: the other fields of `DraftOptions`, in order.
    """
    if num_draft_tokens is None:
        caps = {} if draft_model is None else draft_model.caps
        num_draft_tokens = caps.get("default_draft_size", _DEFAULT_TOKENS)
    return DraftOptions(num_draft_tokens, *rest)


def speculation(
    generator: Any,
    draft_model: Any,
    draft_cache: Any,
    ngram_match_min: int | None,
    options: DraftOptions,
) -> Speculation | None:
    """What drafts for a generator, which has model, cache and tokenizer already; None if nothing.

    Raises:
        ConfigError: arguments that contradict each other or the main model.
        UnsupportedError: a kind of drafter that this version cannot run.
    """
    if (draft_model is None) != (draft_cache is None):
        raise ConfigError("draft_model and draft_cache: give both or neither")
    match_min = 0 if ngram_match_min is None else ngram_match_min
    if not isinstance(match_min, numbers.Integral) or match_min < 0:
        raise ConfigError(f"ngram_match_min is {match_min!r}, expected a whole number, 0 for off")
    if draft_model is not None and match_min:
        raise ConfigError("ngram_match_min excludes draft_model: choose one kind of draft")
    if draft_model is not None:
        _check_model(generator, draft_model, draft_cache)
        if draft_model.caps.get("attach_target"):
            draft_model.attach_target(generator.model)
        drafter = ModelDrafter(draft_model, draft_cache, generator.num_columns)
        return Speculation(drafter, options)
    if match_min:
        return Speculation(NgramDrafter(int(match_min), generator.num_columns), options)
    return None


def _check_model(generator: Any, draft_model: Any, draft_cache: Any) -> None:
    if not draft_model.loaded:
        raise ConfigError("the draft model is not loaded: call draft_model.load() first")
    if draft_cache is generator.cache:
        raise ConfigError("draft_cache is the main cache; the draft model needs one of its own")
    if draft_cache.model is not draft_model:
        raise ConfigError("draft_cache was made for another model than draft_model")
    size, wanted = draft_cache.max_num_tokens, generator.cache.max_num_tokens
    if size != wanted:
        raise ConfigError(
            f"draft_cache has {size} tokens and cache {wanted}; make both the same size"
        )
    for cap in ("recurrent_states", "mtp_draft", "dflash_draft"):
        if draft_model.caps.get(cap):
            raise UnsupportedError(f"a draft model with caps[{cap!r}] cannot be used yet")
    check_vocabularies(generator.model, draft_model, generator.tokenizer)
