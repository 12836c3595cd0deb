"""What a model directory says about its tokenizer, beside tokenizer.json itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from ..errors import ConfigError, FormatError
from ..util.file import read_json

logger = logging.getLogger(__name__)

# Used only where no file of the model names the token at all.
_FALLBACK_IDS = {"bos_token": 1, "eos_token": 2}


@runtime_checkable
class TokenizerConfig(Protocol):
    """What the tokenizer reads of a model's `Config`; EOS ids found in files are added to it."""

    directory: str
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    eos_token_id_list: list[int]


def load_tokenizer_json(directory: str | Path) -> HfTokenizer:
    """Load tokenizer.json.

    Raises:
        ConfigError: there is none; says what else is there.
        FormatError: it cannot be parsed.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "vocab.json") if (path.parent / n).is_file()]
        hint = f" (there is {' and '.join(others)}: convert it with Transformers)" if others else ""
        raise ConfigError(f"{path}: missing{hint}; copy it from the original model")
    try:
        tokenizer = HfTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise FormatError(f"{path}: not a usable tokenizer: {error}") from error
    # Settings of the training run that some files keep: no text is cut or filled up here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


@dataclass(frozen=True, slots=True)
class ExtraToken:
    """A token that only files beside tokenizer.json know."""

    content: str
    special: bool
    lstrip: bool
    rstrip: bool


def listed_tokens(
    tokenizer_config: Mapping[str, Any], added_tokens: Mapping[str, Any]
) -> dict[int, ExtraToken]:
    """Tokens of `added_tokens_decoder` in tokenizer_config.json and of added_tokens.json, by id."""
    found: dict[int, ExtraToken] = {}
    for content, number in added_tokens.items():
        if isinstance(number, int) and number >= 0:
            found[number] = ExtraToken(content, special=False, lstrip=False, rstrip=False)
    entries = tokenizer_config.get("added_tokens_decoder")
    for number, entry in (entries if isinstance(entries, Mapping) else {}).items():
        if not str(number).isdecimal() or not isinstance(entry, Mapping):
            raise FormatError(
                f"tokenizer_config.json: added_tokens_decoder entry {number!r} is not a token"
            )
        if isinstance(entry.get("content"), str):
            found[int(number)] = ExtraToken(
                entry["content"],
                special=bool(entry.get("special")),
                lstrip=bool(entry.get("lstrip")),
                rstrip=bool(entry.get("rstrip")),
            )
    return found


def token_text(entry: Any) -> str | None:
    """The text of a token entry: plain, or an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def named_special_texts(tokenizer_config: Mapping[str, Any]) -> Iterator[str]:
    """Every text that tokenizer_config.json lists as a special token by role."""
    for role in ("bos", "eos", "pad", "unk", "cls", "sep", "mask"):
        text = token_text(tokenizer_config.get(f"{role}_token"))
        if text is not None:
            yield text
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = tokenizer_config.get(key) or ()
        for entry in value.values() if isinstance(value, Mapping) else value:
            text = token_text(entry)
            if text is not None:
                yield text


def added_tokens_of(tokenizer: HfTokenizer) -> dict[int, AddedToken]:
    return dict(tokenizer.get_added_tokens_decoder())


class SpecialIds:
    """Which ids are BOS, EOS, padding and unknown; see the table of the interface page.

    The configuration comes first, then tokenizer_config.json, then ids 1 and 2 for BOS and EOS if
    no file mentions the token. EOS ids found in files are appended to the configuration's list.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        tokenizer_config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        lookup: Mapping[str, int],
    ) -> None:
        self._config = tokenizer_config
        self._lookup = lookup
        self._size = max(lookup.values(), default=-1) + 1
        self.bos = self._first(config.bos_token_id, "bos_token")
        file_eos = self._named("eos_token")
        generation_eos = _id_list(generation_config.get("eos_token_id"))
        known = [i for i in (config.eos_token_id, *config.eos_token_id_list) if i is not None]
        self.eos = next(iter([*known, *_ids(file_eos), *generation_eos]), None)
        if self.eos is None:
            self.eos = self._fallback("eos_token")
        for number in (*_ids(file_eos), *generation_eos):
            if number not in config.eos_token_id_list:
                config.eos_token_id_list.append(number)
        if file_eos is not None:
            config.eos_token_id = file_eos
        self.unk = self._named("unk_token")
        self.pad = self._padding(config.pad_token_id)

    def _named(self, role: str) -> int | None:
        text = token_text(self._config.get(role))
        return None if text is None else self._lookup.get(text)

    def _first(self, configured: int | None, role: str) -> int | None:
        if configured is not None:
            return configured
        named = self._named(role)
        return self._fallback(role) if named is None else named

    def _fallback(self, role: str) -> int | None:
        """Only where the key is absent: null means that there is no such token."""
        number = _FALLBACK_IDS[role]
        if role in self._config or number >= self._size:
            return None
        logger.warning("no file of the model names its %s; taking id %d", role, number)
        return number

    def _padding(self, configured: int | None) -> int:
        if configured is not None:
            return configured
        named = self._named("pad_token")
        if named is None:
            named = self._lookup.get("<pad>")
        if named is None and self.eos != self.bos:
            named = self.eos
        return -1 if named is None else named


def _ids(value: int | None) -> list[int]:
    return [] if value is None else [value]


def _id_list(value: Any) -> list[int]:
    """EOS ids as files have them: a number, a list (with None in it), null."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]
