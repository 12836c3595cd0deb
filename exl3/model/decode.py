"""Decode steps recorded once and replayed: no Python between the ops of a step.

A step is one token for each of `bsz` sequences on a paged cache, all blocks EXL3; a plain head runs
after the replay. What varies from step to step (ids, positions, lengths, page tables, slots) is
written into fixed buffers. On CUDA the step is one captured graph, and its inputs travel in one
copy from pinned memory.
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
from ..modules.head import wide
from ..modules.linear import run_group
from ..modules.low_rank import Adapters
from ..ops.graph import Recording, capture, record
from ..settings import settings
from .adapters import Adapter, Chosen, adapters_of, fill_mask
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
        "loras",
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


def _copied(rows: Tensor) -> Tensor:
    """A copy that the next replay does not overwrite."""
    if rows.is_cuda:
        return rows.clone()
    # By numpy: torch would wake its OpenMP threads for this many values, and those spin for
    # milliseconds on the cores that the next step needs.
    return torch.from_numpy(rows.numpy().copy())


class _Step:
    """Buffers and recording of one bucket on one cache, for some adapters."""

    def __init__(self, rows: int, pages: int, device: torch.device, adapters: Chosen = ()) -> None:
        self.rows = rows
        self.loras = adapters
        self.mask = torch.zeros(rows, len(adapters))
        words = 2 * rows + 2 * rows + rows + rows + rows * pages  # of 4 bytes
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self._device = torch.zeros_like(self._host, device=device) if on_cuda else self._host
        self._sent = torch.cuda.Event() if on_cuda else None
        host, self._tensors = self._split(self._host, pages), self._split(self._device, pages)
        self._views = tuple(t.numpy() for t in host)
        self._views[3][:] = -1
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.pages = pages
        self._live = 0
        self.graph: Recording[Tensor] | None = None

    def _split(self, words: Tensor, pages: int) -> tuple[Tensor, ...]:
        """Ids, positions, lengths, slots and page table in one buffer."""
        n = self.rows
        ids, slots, positions, lengths, table = words.split([2 * n, 2 * n, n, n, n * pages])
        return (
            ids.view(torch.int64),
            positions,
            lengths,
            slots.view(torch.int64),
            table.view(n, pages),
        )

    def fill(self, ids: np.ndarray, table: np.ndarray, past: np.ndarray) -> None:
        """Write one step's inputs: (n,), (n, pages) and (n,) with n <= rows. Rows past n have
        length 0 and store nothing."""
        if self._sent is not None:
            self._sent.synchronize()  # the copy before has left the buffer
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
        if self._sent is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._sent.record()

    def adapters(self, rows: int) -> Adapters | None:
        """The adapters of the first rows."""
        if not self.loras:
            return None
        layers = tuple(lora.layers for lora in self.loras)
        return Adapters(layers, self.mask[:rows], (False,) * len(layers))

    def batch(self, cache: Any) -> Batch:
        """The batch that reads these buffers."""
        ids, positions, seq_lens, slots, table = self._tensors
        return Batch(
            self.rows,
            1,
            positions,
            input_ids=ids,
            cache=cache,
            query_starts=self.query_starts,
            seq_lens=seq_lens,
            page_table=table,
            slots=slots,
            adapters=self.adapters(self.rows),
        )


_StepKey = tuple[int, Chosen]  # rows and adapters


class DecodeGraphs:
    """Recorded steps of one model, by cache and bucket."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: weakref.WeakKeyDictionary[Any, dict[_StepKey, _Step]] = (
            weakref.WeakKeyDictionary()
        )
        self._linears: list[tuple[Linear, Any]] = []  # with the weights that were recorded
        self._refused = False
        self._warned = False  # of a step that could not be recorded

    def step(
        self,
        input_ids: Tensor,
        params: Mapping[str, Any],
        each: tuple[Chosen, ...] | None = None,
    ) -> Tensor | None:
        """Logits (bsz, 1, V_pad) of a step that a recording serves; None: run op by op.

        Args:
            each: adapters of each sequence.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] != 1 or not input_ids.shape[0]:
            return None
        cache = params.get("cache")
        if cache is None or params.get("attn_mode") != "flash_attn" or self._refused:
            return None
        if any(key not in _PLAIN_KEYS and params[key] for key in params):
            return None
        device = self.model.output_device
        if device is None or not self._wanted(device) or not self._same_weights():
            return None
        loras = self._loras(each, device)
        if loras is None:
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
        ids = input_ids.cpu().numpy()[:, 0]
        if device.type == "cuda" and not self._in_range(ids, pages, lengths, cache.num_pages):
            return None
        step = self._step_for(cache, (bucket_size(n), loras), pages.shape[1])
        step.fill(ids, pages, lengths)
        if each is not None:
            fill_mask(step.mask.numpy(), each, loras)
        result = self._run(step, cache)
        if result is None:
            return None
        model, rows = self.model, result[:n]
        if model.head.quantized:
            return model.head.mask(_copied(rows)).unsqueeze(1)
        batch = Batch.dense(n, 1)
        batch.adapters = step.adapters(n)
        return model.head.logits(rows, batch, model.final_norm).unsqueeze(1)

    def _loras(self, each: tuple[Chosen, ...] | None, device: torch.device) -> Chosen | None:
        """The adapters to record a step with; None: these cannot be. On CUDA the additions run op
        by op. Few adapters are recorded by themselves, more than two with all that are loaded:
        otherwise every mixture of requests would need a recording of its own."""
        if each is None:
            return ()
        used, known = adapters_of(each), self.model.adapters
        if device.type == "cuda" or not known.has(used):
            return None
        return used if len(used) <= 2 else adapters_of((known.choose(None),))

    @staticmethod
    def _wanted(device: torch.device) -> bool:
        chosen = settings()
        return chosen.cuda_graph if device.type == "cuda" else chosen.cpu_graph

    def _in_range(
        self, ids: np.ndarray, pages: np.ndarray, past: np.ndarray, cache_pages: int
    ) -> bool:
        """Whether ids and pages exist: kernels on the CPU refuse others, those on CUDA cannot. Says
        False also of bad entries past a sequence's own pages, which are not used."""
        used = pages[:, : int(past.max()) // PAGE_SIZE + 1]
        known_pages = used.min() >= 0 and used.max() < cache_pages
        return bool(known_pages and ids.min() >= 0 and ids.max() < self.model.config.vocab_size)

    def _run(self, step: _Step, cache: Any) -> Tensor | None:
        device = self.model.output_device
        assert device is not None
        try:
            if step.graph is not None:
                return step.graph.replay()
            if device.type == "cuda":
                step.graph = capture(lambda: self._forward(step.batch(cache)), device)
                return step.graph.replay()
            recorded = record(lambda: self._forward(step.batch(cache)))
            step.graph = recorded
            return recorded.result
        except UnsupportedError as error:
            self._refuse(error)
        except RuntimeError as error:
            # An op refused its input; the slower path names the argument that is wrong.
            level = logging.DEBUG if self._warned else logging.WARNING
            logger.log(level, "recorded step failed, it runs op by op: %s", error)
            self._warned = True
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
        return run_group(wide(x), (model.head,), batch, norm=model.final_norm)

    def _step_for(self, cache: Any, key: _StepKey, width: int) -> _Step:
        steps = self._steps.setdefault(cache, {})
        step = steps.pop(key, None)
        if step is None or step.pages < width:
            device = self.model.output_device
            assert device is not None
            step = _Step(key[0], max(width, cache.num_pages), device, key[1])
            if len(steps) >= _MAX_STEPS:
                steps.pop(next(iter(steps)))
        steps[key] = step
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

    def drop_adapter(self, adapter: Adapter | None) -> None:
        """Forget the steps recorded with this adapter."""
        for steps in self._steps.values():
            for key in [key for key in steps if adapter in key[1]]:
                del steps[key]

    def clear(self) -> None:
        """Forget all steps, and with them every weight they hold."""
        self._steps.clear()
        self._linears = []
        self._refused = False
