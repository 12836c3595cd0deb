"""Decode steps recorded once and replayed: no Python between the ops of a step.

A step is one token for each of `bsz` sequences on a paged cache, on the CPU of blocks that are all
EXL3; a plain head runs after the replay. What varies from step to step (ids, positions, lengths,
page tables, slots) is written into fixed buffers. On CUDA the step is one captured graph, and its
inputs travel in one copy from pinned memory. A model that is split over devices has one recording
for each segment, and a fixed buffer where the hidden state enters it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
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
from ..ops.graph import Arena, Graph, Recording, capture, record
from ..settings import settings
from .adapters import Adapter, Chosen, adapters_of, fill_mask
from .inputs import check_cache, page_table
from .segments import Segment

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


def _held(layer: Linear) -> object:
    """What a recording of a layer reads."""
    return layer.plain if layer.weight is None else layer.weight


def _copied(rows: Tensor) -> Tensor:
    """A copy that the next replay does not overwrite."""
    if rows.is_cuda:
        return rows.clone()
    # By numpy: torch would wake its OpenMP threads for this many values, and those spin for
    # milliseconds on the cores that the next step needs.
    return torch.from_numpy(rows.numpy().copy())


class _Step:
    """Buffers and recordings of one bucket on one cache, for some adapters.

    Args:
        devices: of each part of the model.
        segments: how many the model has.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        devices: Sequence[torch.device],
        *,
        segments: int = 1,
        adapters: Chosen = (),
    ) -> None:
        self.rows = rows
        self.loras = adapters
        self.mask = torch.zeros(rows, len(adapters))
        words = 2 * rows + 2 * rows + rows + rows + rows * pages  # of 4 bytes
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=devices[0].type == "cuda")
        self._views = tuple(t.numpy() for t in self._split(self._host, pages))
        self._views[3][:] = -1
        self._sent: list[tuple[Tensor, torch.cuda.Event]] = []
        self._tensors: list[tuple[Tensor, ...]] = []  # of each part
        for device in devices:
            own = self._host
            if device.type == "cuda":
                own = torch.zeros_like(self._host, device=device)
                self._sent.append((own, torch.cuda.Event()))
            starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
            self._tensors.append((*self._split(own, pages), starts))
        self.pages = pages
        self._live = 0
        self.graphs: list[Recording[Tensor] | None] = [None] * segments
        self.entries: list[Tensor | None] = [None] * segments

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
        for _, sent in self._sent:
            sent.synchronize()  # the copy before has left the buffer
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
        for own, sent in self._sent:
            own.copy_(self._host, non_blocking=True)
            sent.record(torch.cuda.current_stream(own.device))

    def adapters(self, rows: int) -> Adapters | None:
        """The adapters of the first rows."""
        if not self.loras:
            return None
        layers = tuple(lora.layers for lora in self.loras)
        return Adapters(layers, self.mask[:rows], (False,) * len(layers))

    def enter(self, index: int, x: Tensor, device: torch.device) -> None:
        """Bring the hidden state to where segment `index` reads it."""
        entry = self.entries[index]
        if entry is None:
            entry = self.entries[index] = torch.empty_like(x, device=device)
        entry.copy_(x)

    def batch(self, cache: Any, part: int) -> Batch:
        """The batch that reads the buffers of a part."""
        ids, positions, seq_lens, slots, table, query_starts = self._tensors[part]
        return Batch(
            self.rows,
            1,
            positions,
            input_ids=ids,
            cache=cache,
            query_starts=query_starts,
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
        self._arena = Arena()  # of all that is recorded on the CPU
        self._lock = threading.Lock()  # one recording runs at a time
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
        with self._lock:
            step = self._step_for(cache, (bucket_size(n), loras), pages.shape[1])
            step.fill(ids, pages, lengths)
            if each is not None:
                fill_mask(step.mask.numpy(), each, loras)
            return self._logits(step, cache, n)

    def _logits(self, step: _Step, cache: Any, n: int) -> Tensor | None:
        """Of the first `n` rows of a step that has its inputs."""
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
        """What the last segment returns, on the output device."""
        model, x = self.model, None
        try:
            for index, segment in enumerate(model.segments):
                if x is not None and not (segment.blocks or model.head.quantized):
                    return x.to(segment.device)
                if x is not None:
                    step.enter(index, x, segment.device)
                x = self._run_segment(step, cache, index, segment)
            return x
        except UnsupportedError as error:
            self._refuse(error)
        except RuntimeError as error:
            # An op refused its input; the slower path names the argument that is wrong.
            level = logging.DEBUG if self._warned else logging.WARNING
            logger.log(level, "recorded step failed, it runs op by op: %s", error)
            self._warned = True
        return None

    def _run_segment(self, step: _Step, cache: Any, index: int, segment: Segment) -> Tensor:
        graph = step.graphs[index]
        if graph is not None:
            return graph.replay()

        def forward() -> Tensor:
            return self._forward(step.batch(cache, segment.part), index, step.entries[index])

        if segment.device.type == "cuda":
            graph = step.graphs[index] = capture(forward, segment.device)
            return graph.replay()
        memory = self._arena.tensor
        recorded = record(forward, self._arena)
        if self._arena.tensor is not memory:
            self._forget_recorded()
        step.graphs[index] = recorded
        return recorded.result

    def _forget_recorded(self) -> None:
        """Drop what was recorded on the CPU in memory that was too small for another step; it is
        recorded again when it is needed."""
        for steps in self._steps.values():
            for step in steps.values():
                step.graphs = [None if isinstance(g, Graph) else g for g in step.graphs]

    def _forward(self, batch: Batch, index: int, x: Tensor | None) -> Tensor:
        """A segment: from ids or the hidden state `x` to the hidden state, or after the last block
        to unmasked logits if the head is not plain."""
        model = self.model
        if x is None:
            assert batch.input_ids is not None
            x = model.embedding.forward(batch.input_ids, batch)
        for block in model.segments[index].blocks:
            x = block.forward(x, batch)
        if index + 1 < len(model.segments) or not model.head.quantized:
            return x
        return run_group(wide(x), (model.head,), batch, norm=model.final_norm)

    def _step_for(self, cache: Any, key: _StepKey, width: int) -> _Step:
        steps = self._steps.setdefault(cache, {})
        step = steps.pop(key, None)
        if step is None or step.pages < width:
            segments = self.model.segments
            devices = {segment.part: segment.device for segment in segments}
            step = _Step(
                key[0],
                max(width, cache.num_pages),
                [devices[part] for part in sorted(devices)],
                segments=len(segments),
                adapters=key[1],
            )
            if len(steps) >= _MAX_STEPS:
                steps.pop(next(iter(steps)))
        steps[key] = step
        return step

    def _same_weights(self) -> bool:
        """True if every block is unobserved, as it was when steps were recorded, and on the CPU
        EXL3; forgets the recordings if not."""
        if self._linears and all(
            _held(layer) is weight and layer.capture is None for layer, weight in self._linears
        ):
            return True
        self.clear()
        layers = {id(m): m for m in self.model if isinstance(m, Linear)}.values()
        on_cpu = [m for m in layers if m.device.type == "cpu" and not m.is_head]
        plain = next((m.key for m in on_cpu if m.weight is None), None)
        if plain is not None:
            self._refuse(f"{plain} is not quantised")
            return False
        if any(layer.capture is not None for layer in layers):
            return False
        self._linears = [(layer, _held(layer)) for layer in layers]
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
        self._arena = Arena()
        self._linears = []
        self._refused = False
