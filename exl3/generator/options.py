"""What a job was asked to do, checked."""

from __future__ import annotations

import logging
import numbers
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError, ShapeError
from ..sampling import CustomSampler, DefaultSampler
from ..settings import settings
from .filter import Filter

logger = logging.getLogger(__name__)


def note_unknown(owner: str, unknown: Iterable[str]) -> None:
    """Warn once per call about keyword arguments that nothing reads.

    Raises:
        ConfigError: in strict mode.
    """
    names = ", ".join(sorted(unknown))
    if not names:
        return
    if settings().strict:
        raise ConfigError(f"{owner}: unknown arguments {names}")
    logger.warning("%s: unknown arguments are ignored: %s", owner, names)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Limits and reports of a job; text rules and sampling are elsewhere."""

    max_new_tokens: int | None
    min_new_tokens: int
    max_skips: int | None
    max_rq_tokens: int | None
    return_top_tokens: int
    return_logits: bool
    return_probs: bool
    decode_special_tokens: bool
    token_healing: bool
    return_prompt_logprobs: int | None

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 0)
        _at_least("min_new_tokens", self.min_new_tokens, 0)
        _at_least("max_skips", self.max_skips, 0)
        _at_least("max_rq_tokens", self.max_rq_tokens, 1)
        _at_least("return_top_tokens", self.return_top_tokens, 0)
        _at_least("return_prompt_logprobs", self.return_prompt_logprobs, 0)

    @property
    def wants_logits(self) -> bool:
        """Whether an event of a token tells about its logits."""
        return bool(self.return_probs or self.return_top_tokens or self.return_logits)


def _at_least(name: str, value: Any, least: int) -> None:
    if value is None and name not in ("min_new_tokens", "return_top_tokens"):
        return
    if not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")


@runtime_checkable
class Draws(Protocol):
    """What a job needs of a sampler."""

    reqs_past_ids: bool

    def forward(self, logits: Any, *args: Any, **kwargs: Any) -> Any: ...


def own_sampler(sampler: Any) -> Any:
    """The sampler of one job; None is `DefaultSampler`. Memory is not shared between jobs.

    Raises:
        ConfigError: not a sampler.
    """
    if sampler is None:
        return DefaultSampler()
    if isinstance(sampler, CustomSampler):
        return sampler.clone()
    if isinstance(sampler, type) or not isinstance(sampler, Draws):
        raise ConfigError(
            f"sampler is {sampler!r}, expected a Sampler object such as ArgmaxSampler()"
        )
    return sampler


def own_random(seed: Any) -> random.Random:
    """The draws of one job.

    Raises:
        ConfigError: a seed that is neither None nor a number.
    """
    if seed is not None and not isinstance(seed, numbers.Real):
        raise ConfigError(f"seed is {seed!r}, expected a whole number or None")
    return random.Random(seed)  # type: ignore[arg-type]


def listed(name: str, values: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """A list of an argument's items, None left out; one string is taken as a list of it.

    Raises:
        ConfigError: no list, tuple or set, or an item that is not of this kind.
    """
    if values is None:
        return []
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, list | tuple | set | frozenset):
        raise ConfigError(f"{name} is {values!r:.60}, expected a list")
    for item in values:
        if item is not None and not isinstance(item, kind):
            raise ConfigError(
                f"{name}: {item!r:.60} is {type(item).__name__}, which cannot be used"
            )
    return [item for item in values if item is not None]


def check_forced(ids: list[int], width: int) -> None:
    """Raises ConfigError for an id that is no token of the model."""
    for token in ids:
        if not 0 <= token < width:
            raise ConfigError(f"constrain_output_now: id {token}, expected one of 0 to {width - 1}")


def checked_filters(filters: Any) -> list[Filter]:
    """A list of filters; one alone is taken as a list of it.

    Raises:
        ConfigError: an item that is not a filter.
    """
    chosen = [filters] if isinstance(filters, Filter) else listed("filters", filters)
    for item in chosen:
        if not isinstance(item, Filter):
            raise ConfigError(f"filters: got {item!r}, expected objects derived from Filter")
    return chosen


def prompt_ids(input_ids: Any) -> NDArray[np.int64]:
    """The ids of a prompt as a flat array.

    Raises:
        ShapeError: not one long tensor (1, L) with L >= 1.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise ShapeError(f"input_ids is {type(input_ids).__name__}, expected a tensor (1, L)")
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    numbers_only = not (input_ids.is_floating_point() or input_ids.dtype is torch.bool)
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.numel() or not numbers_only:
        raise ShapeError(
            f"input_ids is {input_ids.dtype} {tuple(input_ids.shape)}, expected long (1, L), L >= 1"
        )
    return input_ids[0].to("cpu", torch.long).numpy().copy()
