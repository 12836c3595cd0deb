"""Embeddings that take the place of tokens in a prompt: images, mostly."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError

# Ids from here on stand for rows of embeddings; no vocabulary comes near.
FIRST_EMBEDDING_ID = 1_000_000_000


class _Counter:
    """Hands out ranges of ids, each id once per process."""

    def __init__(self) -> None:
        self._next = FIRST_EMBEDDING_ID
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        with self._lock:
            first = self._next
            self._next += count
            return first


_ids = _Counter()


class MMEmbedding:
    """Embeddings with ids of their own, and a text alias by which a prompt refers to them.

    Args:
        embeddings: (mm_length, hidden), kept on the host.
        token_string: (1, full_length) long, -1 at the positions of the embeddings, other tokens
            (start and end of image) as they are. None: the embeddings alone.
        text_alias: what stands for them in text; default `<$EMB_{first_index}$>`.
        deepstack_embeddings: further (mm_length, hidden) tensors for deeper layers.
        grid_thw, mrope_merge_size: sizes for multimodal RoPE.
        imp: attributes of an object made in another process, taken over as they are.
    Two objects of one image have different ids: reuse the object to reuse cached pages.

    Raises:
        ShapeError: the -1 positions do not match the embeddings.
    """

    def __init__(
        self,
        embeddings: Tensor | None = None,
        token_string: Tensor | None = None,
        text_alias: str | None = None,
        deepstack_embeddings: Sequence[Tensor] | None = None,
        grid_thw: Any = None,
        mrope_merge_size: int | None = None,
        imp: Mapping[str, Any] | None = None,
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self.embeddings: Tensor | None = None
        self.deepstack_embeddings: list[Tensor] | None = None
        if imp is not None:
            self.__dict__.update(imp)
            return
        if embeddings is None or embeddings.dim() != 2:
            shape = None if embeddings is None else tuple(embeddings.shape)
            raise ShapeError(f"MMEmbedding: embeddings are {shape}, expected (mm_length, hidden)")
        self.mm_length = int(embeddings.shape[0])
        self.embeddings = embeddings.cpu()
        if deepstack_embeddings is not None:
            self.deepstack_embeddings = [tensor.cpu() for tensor in deepstack_embeddings]
        self.grid_thw = grid_thw
        self.mrope_merge_size = mrope_merge_size
        self.first_index = _ids.take(self.mm_length)
        self.last_index = self.first_index + self.mm_length
        self.token_string = self._number(token_string)
        self.token_list: list[int] = self.token_string[0].tolist()
        self.full_length = len(self.token_list)
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"

    def _number(self, token_string: Tensor | None) -> Tensor:
        """Put the fresh ids where `token_string` has -1; (1, full_length) long."""
        fresh = torch.arange(self.first_index, self.last_index, dtype=torch.long)
        if token_string is None:
            return fresh.unsqueeze(0)
        if token_string.dim() != 2 or token_string.shape[0] != 1:
            raise ShapeError(
                f"MMEmbedding: token_string is {tuple(token_string.shape)}, expected (1, length)"
            )
        numbered = token_string.to(device="cpu", dtype=torch.long, copy=True)
        places = numbered == -1
        if int(places.sum()) != self.mm_length:
            raise ShapeError(
                f"MMEmbedding: token_string has {int(places.sum())} positions of -1 for "
                f"{self.mm_length} embeddings; expected as many"
            )
        numbered[places] = fresh
        return numbered
