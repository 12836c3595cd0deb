"""Decode steps recorded once and replayed: no Python between the ops of a step.

A step is one token for each of `bsz` sequences on a paged cache, all blocks EXL3; a plain head runs
after the replay. What varies from step to step (ids, positions, lengths, page tables, slots) is
written into fixed buffers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import UnsupportedError
from ..modules import Batch, Linear
from ..modules.linear import run_group
from ..ops.graph import Graph, record
from ..settings import settings
from .inputs import check_cache, page_table

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger(__name__)

# Keys of `params` that a recorded step understands; any other with a value runs op by op.
_PLAIN_KEYS = frozenset(
    [
        "attn_mode",
        "batch_shape",
        "block_table",
        "cache",
        "cache_seqlens",
        "last_tokens_only",
        "past_len",
    ]
)
_MAX_STEPS = 24  # recordings kept per cache, the least recently used goes first


def bucket_size(rows: int) -> int:
    """Rows that a step for `rows` sequences is recorded with: exact to 8, then under 1/8 more."""
    if rows <= 8:
        return rows
    step = 1 << max((rows - 1).bit_length() - 4, 0)
    return -(-rows // step) * step


class _Step:
    """Buffers and recording of one bucket on one cache."""

    def __init__(self, rows: int, pages: int) -> None:
        self.rows = rows
        self.ids = torch.zeros(rows, dtype=torch.int64)
        self.positions = torch.zeros(rows, dtype=torch.int32)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32)
        self.slots = torch.full((rows,), -1, dtype=torch.int64)
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32)
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32)
        self._views = tuple(
            t.numpy()
            for t in (self.ids, self.positions, self.seq_lens, self.slots, self.page_table)
        )
        self._live = 0
        self.graph: Graph[Tensor] | None = None

    def fill(self, ids: np.ndarray, table: np.ndarray, past: np.ndarray) -> None:
        """Write one step's inputs: (n,), (n, pages) and (n,) with n <= rows. Rows past n have
        length 0 and store nothing."""
        n = ids.shape[0]
        own_ids, positions, seq_lens, slots, page_table_ = self._views
        if n < self._live:
            own_ids[n:], positions[n:], seq_lens[n:], slots[n:] = 0, 0, 0, -1
        self._live = n
        page = table[np.arange(n), past // PAGE_SIZE].astype(np.int64)
        own_ids[:n], positions[:n] = ids, past
        np.add(past, 1, out=seq_lens[:n], casting="same_kind")
        slots[:n] = page * PAGE_SIZE + past % PAGE_SIZE
        page_table_[:n, : table.shape[1]] = table

    def batch(self, cache: Any) -> Batch:
        """The batch that reads these buffers."""
        return Batch(
            self.rows,
            1,
            self.positions,
            input_ids=self.ids,
            cache=cache,
            query_starts=self.query_starts,
            seq_lens=self.seq_lens,
            page_table=self.page_table,
            slots=self.slots,
        )


class DecodeGraphs:
    """Recorded steps of one model, by cache and bucket."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: weakref.WeakKeyDictionary[Any, dict[int, _Step]] = weakref.WeakKeyDictionary()
        self._linears: list[tuple[Linear, Any]] = []  # with the weights that were recorded
        self._refused = False

    def step(self, input_ids: Tensor, params: Mapping[str, Any]) -> Tensor | None:
        """Logits (bsz, 1, V_pad) of a step that a recording serves; None: run op by op."""
        if input_ids.dim() != 2 or input_ids.shape[1] != 1 or not input_ids.shape[0]:
            return None
        cache = params.get("cache")
        if cache is None or params.get("attn_mode") != "flash_attn" or self._refused:
            return None
        if any(key not in _PLAIN_KEYS and params[key] for key in params):
            return None
        if not (settings().cpu_graph and self.model.loaded and self._same_weights()):
            return None
        check_cache(self.model, cache)
        n = input_ids.shape[0]
        table, past = page_table(params, n)
        lengths, pages = past.numpy(), table.numpy()
        longest, limit = lengths.max(), self.model.config.max_position_embeddings
        if lengths.min() < 0 or longest // PAGE_SIZE >= pages.shape[1]:
            return None  # the slower path says what is wrong
        if longest >= limit and not self.model.warned_length:
            return None  # and warns of this, once
        step = self._step_for(cache, bucket_size(n), pages.shape[1])
        step.fill(input_ids.numpy()[:, 0], pages, lengths)
        result = self._run(step, cache)
        if result is None:
            return None
        model, rows = self.model, result[:n]
        if model.head.quantized:
            return model.head.mask(rows.clone()).unsqueeze(1)
        return model.head.logits(rows, Batch.dense(n, 1), model.final_norm).unsqueeze(1)

    def _run(self, step: _Step, cache: Any) -> Tensor | None:
        try:
            if step.graph is not None:
                return step.graph.replay()
            step.graph = record(lambda: self._forward(step.batch(cache)))
            return step.graph.result
        except UnsupportedError as error:
            self._refuse(error)
        except RuntimeError as error:
            # An op refused its input; the slower path names the argument that is wrong.
            logger.debug("recorded step failed: %s", error)
        return None

    def _forward(self, batch: Batch) -> Tensor:
        """Unmasked logits, or what enters the final norm if the head is plain."""
        model = self.model
        assert batch.input_ids is not None
        x = model.embedding.forward(batch.input_ids, batch)
        for block in model.blocks:
            x = block.forward(x, batch)
        if not model.head.quantized:
            return x
        return run_group(x, (model.head,), batch, norm=model.final_norm)

    def _step_for(self, cache: Any, rows: int, width: int) -> _Step:
        steps = self._steps.setdefault(cache, {})
        step = steps.pop(rows, None)
        if step is None or step.page_table.shape[1] < width:
            step = _Step(rows, max(width, cache.num_pages))
            if len(steps) >= _MAX_STEPS:
                steps.pop(next(iter(steps)))
        steps[rows] = step
        return step

    def _same_weights(self) -> bool:
        """True if every block is EXL3, unobserved, and as it was when steps were recorded; forgets
        the recordings if not."""
        if self._linears and all(
            layer.weight is weight and layer.capture is None for layer, weight in self._linears
        ):
            return True
        self.clear()
        layers = {id(m): m for m in self.model if isinstance(m, Linear)}.values()
        plain = next((m.key for m in layers if m.weight is None and not m.is_head), None)
        if plain is not None:
            self._refuse(f"{plain} is not quantised")
            return False
        if any(layer.capture is not None for layer in layers):
            return False
        self._linears = [(layer, layer.weight) for layer in layers]
        return True

    def _refuse(self, reason: object) -> None:
        """Run op by op until the model is loaded again."""
        self.clear()
        self._refused = True
        logger.info("decode steps run op by op, which is slower: %s", reason)

    def drop(self, cache: Any) -> None:
        """Forget the steps recorded with this cache."""
        self._steps.pop(cache, None)

    def clear(self) -> None:
        """Forget all steps, and with them every weight they hold."""
        self._steps.clear()
        self._linears = []
        self._refused = False
