"""The tokenizer of a model."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .embedding import MMEmbedding
from .encoder import TextEncoder
from .files import (
    ExtraToken,
    SpecialIds,
    TokenizerConfig,
    added_tokens_of,
    listed_tokens,
    load_tokenizer_json,
    named_special_texts,
    read_optional,
)
from .pieces import PieceRules, PieceTable
from .template import ChatTemplates, read_templates

logger = logging.getLogger(__name__)


def _texts(text: Any) -> list[str]:
    """Raises ConfigError for what is neither a text nor a list of texts."""
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
        raise ConfigError(f"text is {text!r:.60}, expected a str or a list of them")
    return list(texts)


class Tokenizer:
    """Text to ids and back by the model's tokenizer.json.

    Args:
        config: the model's `Config`; EOS ids found in the tokenizer's files are added to it.
    Raises:
        ConfigError: not a config, or no tokenizer.json.
        FormatError: a file that cannot be parsed.
        UnsupportedError: a decoder that is neither byte-level nor SentencePiece-like.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        if not isinstance(config, TokenizerConfig):
            raise ConfigError(
                f"config is {config!r:.80}, expected a Config: Config.from_directory(directory)"
            )
        folder = Path(config.directory)
        self.config = config
        self.tokenizer = load_tokenizer_json(folder)
        self.tokenizer_config_dict = read_optional(folder / "tokenizer_config.json")
        self.generation_config_dict = read_optional(folder / "generation_config.json")
        listed = listed_tokens(
            self.tokenizer_config_dict, read_optional(folder / "added_tokens.json")
        )
        self._vocab: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        self._extra = self._unknown_to_json(listed)
        self._vocab.update({t.content: i for i, t in self._extra.items()})
        self._raw: dict[int, str] = {i: piece for piece, i in self._vocab.items()}
        added = added_tokens_of(self.tokenizer)
        self.extended_id_to_piece: dict[int, str] = {
            **{i: t.content for i, t in listed.items() if self._raw.get(i) == t.content},
            **{i: t.content for i, t in added.items()},
        }
        self.extended_piece_to_id = {p: i for i, p in sorted(self.extended_id_to_piece.items())}
        self.raw_vocab_size = self.tokenizer.get_vocab_size()
        self.actual_vocab_size = max(self._raw, default=-1) + 1
        ids = SpecialIds(
            config, self.tokenizer_config_dict, self.generation_config_dict, self._vocab
        )
        self.bos_token_id, self.eos_token_id = ids.bos, ids.eos
        self.pad_token_id, self.unk_token_id = ids.pad, ids.unk
        self._special = self._special_ids(
            {i for i, t in added.items() if t.special}, {i for i, t in listed.items() if t.special}
        )
        self._encoder = TextEncoder(self.tokenizer, self._extra)
        self.bos_token = self._text_of(self.bos_token_id)
        self.eos_token = self._text_of(self.eos_token_id)
        self.unk_token = self._text_of(self.unk_token_id)
        self.pad_token = self._text_of(self.pad_token_id) or ""
        self.newline_token, self.newline_token_id = "\n", self._last_id("\n")
        self.space_token, self.space_token_id = " ", self._last_id(" ")

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> Tokenizer:
        return cls(config)

    def _unknown_to_json(self, listed: Mapping[int, ExtraToken]) -> dict[int, ExtraToken]:
        taken = set(self._vocab.values())
        return {i: t for i, t in listed.items() if t.content not in self._vocab and i not in taken}

    def _special_ids(self, *flagged: set[int]) -> frozenset[int]:
        """Ids that decode to nothing: flagged special in a file, or an added token with a role."""
        roles = {self._vocab.get(text) for text in named_special_texts(self.tokenizer_config_dict)}
        roles |= {self.bos_token_id, self.eos_token_id, self.pad_token_id}
        known = {i for i in roles if i is not None and i in self.extended_id_to_piece}
        return frozenset().union(known, *flagged)

    def _text_of(self, token: int | None) -> str | None:
        return None if token is None else self._raw.get(token)

    def _last_id(self, text: str) -> int | None:
        ids = self._encoder.encode(text)
        return ids[-1] if ids else None

    # Encoding

    def encode(  # the parameters are those of the public interface
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Sequence[MMEmbedding] | None = None,
        *,
        literal_special: bool = False,
    ) -> Any:
        """Encode a text or several.

        Args:
            text: one text, or a list.
            add_bos, add_eos: put that token at the end in question.
            encode_special_tokens: also recognise special tokens that only tokenizer_config.json
                lists, and add what the tokenizer's post-processor adds, at most once. Special
                tokens of tokenizer.json become ids in either mode.
            return_offsets: also return int32 (b,): minus the padding of each row.
            embeddings: each `text_alias` in the text becomes that embedding's ids.
            literal_special: text of special tokens is plain text.
        Returns:
            Long (1, n) for a text, n may be 0; (b, longest) for a list, padded on the left.
        """
        texts = _texts(text)
        rows = [
            self._ends(
                self._encoder.encode(
                    item,
                    extra=encode_special_tokens,
                    literal=literal_special,
                    embeddings=embeddings,
                ),
                add_bos=add_bos,
                add_eos=add_eos,
                post_process=encode_special_tokens,
            )
            for item in texts
        ]
        ids, offsets = self._pad(rows)
        return (ids, offsets) if return_offsets else ids

    def _ends(
        self, ids: list[int], *, add_bos: bool, add_eos: bool, post_process: bool
    ) -> list[int]:
        """Add BOS and EOS. With the post-processor's ends: none that is there already."""
        if post_process:
            before, after = self._encoder.ends
            if before and ids[: len(before)] != before:
                ids = before + ids
            if after and ids[-len(after) :] != after:
                ids = ids + after
        if add_bos and self.bos_token_id is not None:
            there = post_process and ids[:1] == [self.bos_token_id]
            ids = ids if there else [self.bos_token_id, *ids]
        if add_eos and self.eos_token_id is not None:
            there = post_process and ids[-1:] == [self.eos_token_id]
            ids = ids if there else [*ids, self.eos_token_id]
        return ids

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows), default=0)
        fill = self.pad_token_id
        if fill < 0:
            fill = 0
            if any(len(row) < width for row in rows):
                logger.warning("the model has no padding token; rows are padded with id 0")
        ids = torch.full((len(rows), width), fill, dtype=torch.long)
        for line, row in zip(ids, rows, strict=True):
            if row:
                line[width - len(row) :] = torch.tensor(row, dtype=torch.long)
        offsets = [len(row) - width for row in rows]
        return ids, torch.tensor(offsets, dtype=torch.int32)

    def num_tokens(self, text: str) -> int:
        return len(self._encoder.encode(*_texts(text)))

    def padding_mask(self, ids: Tensor) -> Tensor:
        """Float16 of the shape of `ids`: -inf at padding, else 0."""
        mask = torch.zeros(ids.shape, dtype=torch.float16)
        return mask.masked_fill_(ids == self.pad_token_id, float("-inf"))

    def single_token(self, token_id: int) -> Tensor:
        return torch.tensor([[token_id]], dtype=torch.long)

    def single_id(self, text: str) -> int | None:
        """The id of exactly this piece or added token, else None."""
        for table in (self.extended_piece_to_id, self.get_piece_to_id_dict(), self._vocab):
            if text in table:
                return table[text]
        return None

    # Decoding

    def decode(
        self, ids: Tensor | Sequence[Tensor], decode_special_tokens: bool = False
    ) -> str | list[str]:
        """The text of ids.

        Args:
            ids: 1-D tensor: str. 2-D tensor, or a list of tensors: a list of str.
            decode_special_tokens: show special tokens as their text.
        Padding at the start of a row is dropped, and so are ids that the tokenizer does not have.
        """
        if isinstance(ids, Tensor):
            if ids.dim() == 1:
                return self._decode_row(ids.tolist(), decode_special_tokens)
            if ids.dim() != 2:
                raise ConfigError(f"decode: ids are {tuple(ids.shape)}, expected 1 or 2 dimensions")
            return [self._decode_row(row, decode_special_tokens) for row in ids.tolist()]
        if not isinstance(ids, list | tuple):
            raise ConfigError(f"decode: ids is {ids!r:.60}, expected a tensor or a list of them")
        if all(isinstance(item, int) for item in ids) and len(ids):
            return self._decode_row([int(item) for item in ids], decode_special_tokens)
        if not all(isinstance(item, Tensor) for item in ids):
            raise ConfigError(f"decode: ids is {ids!r:.60}, expected a tensor or a list of them")
        return [self._decode_row(item.flatten().tolist(), decode_special_tokens) for item in ids]

    def _decode_row(self, ids: list[int], decode_special_tokens: bool) -> str:
        return self.piece_table.decode(
            self._without_padding(ids), decode_special=decode_special_tokens
        )

    def _without_padding(self, ids: list[int]) -> list[int]:
        """Drop leading padding. A lone token is none; where padding is also BOS, one stays."""
        start = 0
        while start < len(ids) and ids[start] == self.pad_token_id and len(ids) > 1:
            start += 1
        if start and start < len(ids) and self.pad_token_id == self.bos_token_id:
            start -= 1
        return ids[start:]

    @cached_property
    def piece_table(self) -> PieceTable:
        """The bytes of every id; what decoding and streaming work on."""
        return PieceTable(
            PieceRules.of(self.tokenizer),
            self._raw,
            added=self.extended_id_to_piece,
            special=self._special,
        )

    @property
    def id_to_piece(self) -> list[str]:
        return self.get_id_to_piece_list()

    @cached_property
    def _plain_texts(self) -> list[str]:
        return self.piece_table.texts(decode_special=False)

    @cached_property
    def _all_texts(self) -> list[str]:
        return self.piece_table.texts(decode_special=True)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Decoded text of every id, length `actual_vocab_size`; the same list at each call."""
        return self._all_texts if include_special_tokens else self._plain_texts

    def get_fixed_vocab(self) -> list[str]:
        """Decoded pieces, special tokens empty."""
        return self._plain_texts

    @cached_property
    def _piece_to_id(self) -> dict[str, int]:
        # A byte token is last: text prefers the piece proper of the same character.
        byte_tokens = self.piece_table.byte_tokens
        order = sorted(self._raw, key=lambda i: (i in byte_tokens, i))
        table: dict[str, int] = {}
        for i in order:
            table.setdefault(self._all_texts[i], i)
        return table

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """Decoded piece to id; the lowest id where several have one text."""
        return self._piece_to_id

    def get_vocab_dict(self) -> dict[str, int]:
        """Raw piece to id."""
        return self._vocab

    @cached_property
    def _ords(self) -> list[int]:
        special = self._special
        return [
            data[0] if len(data) == 1 and i not in special else -1
            for i, data in enumerate(self.piece_table.bytes)
        ]

    def get_id_to_ord_list(self) -> list[int]:
        """The byte of every id that stands for a single one, else -1."""
        return self._ords

    @cached_property
    def _sorted_pieces(self) -> tuple[list[bytes], list[int]]:
        table = self.piece_table
        ids = [i for i in sorted(self._raw) if table.bytes[i] and i not in self._special]
        ids.sort(key=lambda i: table.bytes[i])
        return [table.bytes[i] for i in ids], ids

    def _with_prefix(self, prefix: bytes) -> list[int]:
        pieces, ids = self._sorted_pieces
        start = bisect_left(pieces, prefix)
        end = bisect_right(pieces, prefix, lo=start, key=lambda piece: piece[: len(prefix)])
        return sorted(ids[start:end])

    def get_tokens_with_prefix_string(self, prefix: str) -> list[int]:
        """Ids whose text starts with `prefix`, ascending; special tokens are left out."""
        return self._with_prefix(prefix.encode("utf-8", "replace"))

    def get_tokens_with_prefix_id(self, prefix_id: int) -> list[int]:
        """Ids whose bytes start with those of a token, itself among them."""
        if not 0 <= prefix_id < self.actual_vocab_size:
            raise ConfigError(
                f"get_tokens_with_prefix_id: id {prefix_id}, expected 0 to "
                f"{self.actual_vocab_size - 1}"
            )
        return self._with_prefix(self.piece_table.bytes[prefix_id])

    # Chat templates

    @cached_property
    def _templates(self) -> ChatTemplates:
        named = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return ChatTemplates(
            read_templates(self.config.directory, self.tokenizer_config_dict),
            {key: text for key, text in named.items() if text},
            where=self.config.directory,
        )

    def hf_render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation as text; see `ChatTemplates.render`."""
        return self._templates.render(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def hf_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        embeddings: Sequence[MMEmbedding] | None = None,
        **template_kwargs: Any,
    ) -> Tensor:
        """The prompt of a conversation as ids, long (1, n).

        With embeddings, the k-th image placeholder in the text stands for the k-th of them.

        Raises:
            ConfigError: no template, or placeholders that do not match the embeddings.
        """
        text = self.hf_render_chat_template(messages, add_generation_prompt, **template_kwargs)
        if embeddings:
            text = self._place_aliases(text, embeddings)
        ids = self._encoder.encode(text, extra=True, embeddings=embeddings)
        return self._pad([ids])[0]

    def _place_aliases(self, text: str, embeddings: Sequence[MMEmbedding]) -> str:
        image_id = getattr(self.config, "image_token_id", None)
        placeholder = self._text_of(image_id)
        if not placeholder:
            raise ConfigError(
                f"{self.config.directory}: image_token_id is {image_id}, not a token of the "
                "vocabulary; embeddings cannot be placed by the chat template"
            )
        parts = text.split(placeholder)
        if len(parts) != len(embeddings) + 1:
            raise ConfigError(
                f"the chat template has {len(parts) - 1} image placeholders ({placeholder}) for "
                f"{len(embeddings)} embeddings; give each image its place in the messages"
            )
        aliases = [embedding.text_alias for embedding in embeddings]
        return "".join(p + a for p, a in zip(parts, [*aliases, ""], strict=True))
