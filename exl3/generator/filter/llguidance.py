"""Filter on top of the `llguidance` package."""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, UnsupportedError
from .base import Filter

logger = logging.getLogger(__name__)

_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)

# White space between the parts of a JSON text: a space, or a line break with an indent. Without a
# bound a model may go on with white space until its limit.
_BOUNDED = {"whitespace_pattern": r"[ ]|\n[ ]{0,20}"}
# For versions of the package that let the pattern repeat.
_COMPACT = {"whitespace_flexible": False}

# Reasons of a matcher to stop that mean that the grammar is satisfied.
_FINISHED = ("NoExtension", "NoExtensionBias", "EndOfSentence")


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "LLGuidanceFilter needs the package `llguidance`: pip install llguidance"
        ) from error
    return llguidance


def _vocabulary(tokenizer: Any) -> Any:
    """The package's form of the vocabulary; about a second to build, kept per tokenizer and set of
    ids that end a text.

    Raises:
        ConfigError: the package cannot read the tokenizer.
    """
    size = tokenizer.actual_vocab_size
    known = [*tokenizer.config.eos_token_id_list, tokenizer.eos_token_id]
    stops = tuple(sorted({i for i in known if i is not None and 0 <= i < size}))
    made = _vocabularies.setdefault(tokenizer, {})
    if stops not in made:
        try:
            made[stops] = _package().LLTokenizer(
                tokenizer.tokenizer.to_str(),
                n_vocab=size,
                eos_token=list(stops) if len(stops) > 1 else stops[0] if stops else None,
            )
        except ValueError as error:
            raise ConfigError(
                f"LLGuidanceFilter: the package cannot use this tokenizer: {error}"
            ) from error
    return made[stops]


class LLGuidanceFilter(Filter):
    """Constrains to a JSON schema, regular expression or grammar; exactly one of them."""

    def __init__(
        self,
        tokenizer: Any,
        trigger_token: int | None = None,
        prefix_str: str | None = None,
        eos_after_completed: bool = False,
        json_schema: dict[str, Any] | str | None = None,
        regex: str | None = None,
        lark_grammar: str | None = None,
        gbnf_grammar: str | None = None,
        llg_grammar: str | None = None,
        consume_prefix: bool = False,
    ) -> None:
        super().__init__(tokenizer, trigger_token, prefix_str, eos_after_completed)
        self.consume_prefix = consume_prefix
        given = {
            "json_schema": json_schema,
            "regex": regex,
            "lark_grammar": lark_grammar,
            "gbnf_grammar": gbnf_grammar,
            "llg_grammar": llg_grammar,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        if len(chosen) != 1:
            raise ConfigError(
                f"LLGuidanceFilter: exactly one of {', '.join(given)} is needed, "
                f"got {', '.join(chosen) or 'none'}"
            )
        package = _package()
        kind, source = chosen.popitem()
        vocabulary = _vocabulary(tokenizer)
        grammar = _compile(package, vocabulary, kind, source)
        self._matcher = package.LLMatcher(vocabulary, grammar, log_level=0)
        self._check(f"bad {kind}: ")
        for warning in self._matcher.get_grammar_warnings():
            logger.warning("LLGuidanceFilter: %s: %s", kind, warning)

    def _check(self, what: str = "") -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<state>")[0].strip()
            raise ConfigError(f"LLGuidanceFilter: {what}{reason}")

    def reset(self) -> None:
        self._matcher.reset()
        if self.consume_prefix and self.prefix_str:
            for token in self.tokenizer.encode(self.prefix_str).flatten().tolist():
                self.accept_token(token)

    def accept_token(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def get_next_logit_mask(self) -> Tensor:
        bits = self._matcher.compute_bitmask()
        self._check()
        return torch.frombuffer(bytearray(bits), dtype=torch.int32).unsqueeze(0)

    def is_completed(self) -> bool:
        if not self._matcher.is_stopped():
            return False
        reason = self._matcher.stop_reason()
        if reason not in _FINISHED:  # a limit of the parser: the text is not what was asked for
            raise ConfigError(f"LLGuidanceFilter: the grammar cannot go on: {reason}")
        return True

    def rollback_tokens(self, count: int) -> bool:
        return bool(self._matcher.rollback(count))

    def get_captures(self) -> dict[str, Any]:
        """What the named parts of the grammar matched.

        Raises:
            UnsupportedError: llguidance before 1.7.
        """
        if not hasattr(self._matcher, "get_captures"):
            raise UnsupportedError("get_captures needs llguidance 1.7 or later")
        return dict(self._matcher.get_captures())


def _json_defaults(package: Any, vocabulary: Any) -> dict[str, Any]:
    """Options that bound white space, tried on a text with too much of it."""
    grammar = package.LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_BOUNDED)
    too_much = vocabulary.tokenize_str("{" + 8 * " ")
    taken = package.LLMatcher(vocabulary, grammar, log_level=0).try_consume_tokens(too_much)
    return _COMPACT if taken == len(too_much) else _BOUNDED


def _compile(package: Any, vocabulary: Any, kind: str, source: Any) -> str:
    matcher = package.LLMatcher
    try:
        if kind == "json_schema":
            text = source if isinstance(source, str) else json.dumps(source)
            defaults = _json_defaults(package, vocabulary)
            return matcher.grammar_from_json_schema(text, defaults=defaults)
        if kind == "regex":
            return matcher.grammar_from_regex(source)
        if kind == "lark_grammar":
            return matcher.grammar_from_lark(source)
        if kind == "gbnf_grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            return matcher.grammar_from_lark(any_to_lark(source))
        return source
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"LLGuidanceFilter: bad {kind}: {error}") from error
