"""Text to ids on top of the Hugging Face `tokenizers` object."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as HfTokenizer

from .embedding import MMEmbedding
from .files import ExtraToken

_PROBE = "a"


class TextEncoder:
    """Encodes text with the special tokens, embeddings and ends that the caller asks for.

    Args:
        tokenizer: the wrapped object; never changed. Where other rules are needed a copy is made
            at first use.
        extra: special tokens that tokenizer.json does not know, by id.
    """

    def __init__(self, tokenizer: HfTokenizer, extra: Mapping[int, ExtraToken]) -> None:
        self._tokenizer = tokenizer
        self._extra = {i: token for i, token in extra.items() if token.special and token.content}
        # Stands for an embedding while the text around it is encoded; in no text by chance.
        self._placeholder = f"<|embedding-{secrets.token_hex(16)}|>"

    def encode(
        self,
        text: str,
        *,
        extra: bool = False,
        literal: bool = False,
        embeddings: Sequence[MMEmbedding] | None = None,
    ) -> list[int]:
        """Ids of a text without BOS and EOS.

        Args:
            extra: recognise special tokens that only tokenizer_config.json lists.
            literal: special tokens are plain text.
            embeddings: put their ids where their aliases are.
        """
        text = well_formed(text)
        if literal:
            tokenizer = self._literal
        elif extra and self._extra:
            tokenizer = self._with_extra
        elif embeddings:
            tokenizer = self._with_placeholder
        else:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        order: list[list[int]] = []
        if embeddings:
            if literal:
                tokenizer = self._literal_with_placeholder
            text = self._mark(text, embeddings, order)
        return self._resolve(tokenizer.encode(text, add_special_tokens=False), order)

    def _mark(self, text: str, embeddings: Sequence[MMEmbedding], order: list[list[int]]) -> str:
        """Put the placeholder for every alias and note in `order` the ids that it stands for.

        So the text is encoded as one, and what is beside an embedding follows the tokenizer's
        rules for text beside a token.
        """
        by_alias = {embedding.text_alias: embedding.token_list for embedding in embeddings}
        aliases = sorted(by_alias, key=len, reverse=True)

        def swap(match: re.Match[str]) -> str:
            order.append(by_alias[match.group()])
            return self._placeholder

        return re.sub("|".join(map(re.escape, aliases)), swap, text)

    def _resolve(self, encoding: Encoding, order: list[list[int]]) -> list[int]:
        """From the ids of a copy, which numbers added tokens itself, to those of the model.

        Goes by the text of the tokens: where ids have gaps, a copy's numbers may not be unique.
        """
        numbers = {token.content: i for i, token in self._extra.items()}
        embedded = iter(order)
        ids: list[int] = []
        for number, text in zip(encoding.ids, encoding.tokens, strict=True):
            if text == self._placeholder:
                ids.extend(next(embedded))
            else:
                ids.append(numbers.get(text.strip(), number))
        return ids

    @cached_property
    def _with_extra(self) -> HfTokenizer:
        tokenizer = copy.deepcopy(self._with_placeholder)
        tokenizer.add_special_tokens(
            [
                AddedToken(t.content, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
                for t in self._extra.values()
            ]
        )
        return tokenizer

    @cached_property
    def _with_placeholder(self) -> HfTokenizer:
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.add_special_tokens([AddedToken(self._placeholder, normalized=False)])
        return tokenizer

    @cached_property
    def _literal_with_placeholder(self) -> HfTokenizer:
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.encode_special_tokens = True
        # Not special, so that it is matched although special tokens are not.
        tokenizer.add_tokens([AddedToken(self._placeholder, normalized=False, special=False)])
        return tokenizer

    @cached_property
    def _literal(self) -> HfTokenizer:
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """What the tokenizer's post-processor puts before and after a text."""
        body = self._tokenizer.encode(_PROBE, add_special_tokens=False).ids
        full = self._tokenizer.encode(_PROBE, add_special_tokens=True).ids
        for start in range(len(full) - len(body) + 1):
            if full[start : start + len(body)] == body:
                return full[:start], full[start + len(body) :]
        return [], []


def well_formed(text: str) -> str:
    """Text without lone surrogates, which have no UTF-8 form; each becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
