"""Forward passes: prompt chunks of one job, decode steps of many."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import Exl3Error
from .ahead import Ahead, Run
from .guidance import combine
from .job import Job
from .packing import Part, pack
from .pages import PageTable
from .sequence import Sequence

logger = logging.getLogger(__name__)


class Runner:
    """Feeds jobs to the model."""

    def __init__(self, model: Any, cache: Any, table: PageTable, max_chunk_size: int) -> None:
        self.model = model
        self.cache = cache
        self.table = table
        self.chunk = max(PAGE_SIZE, max_chunk_size // PAGE_SIZE * PAGE_SIZE)
        self.room = 0  # prompt tokens that this step may still compute
        self.prefill_tokens = 0  # computed so far
        self._jobs: list[Job] = []  # of the last decode step
        self._tables: list[Tensor] = []
        self._params: dict[str, Any] = {}
        self._ids = self._lengths = torch.zeros(0)
        self._ahead: Ahead | None = None
        self.runs_ahead = True  # until that fails

    @property
    def is_asynchronous(self) -> bool:
        """Whether a pass only queues its work, on a device."""
        device = getattr(self.model, "output_device", None)
        return device is not None and device.type == "cuda"

    def prefill(self, job: Job) -> bool:
        """Ingest what there is room for of a job's prompt, then of its negative one; False if
        nothing was done. One at a time: a draft model must follow before they share a page."""
        return any(self._ingest(job, s) for s in job.sequences if not s.is_ingested)

    def _ingest(self, job: Job, sequence: Sequence) -> bool:
        """A chunk of one sequence, all but its last token at most. Chunks end on page ends."""
        last, final = len(sequence) - 1, job.final_length(sequence)
        report = job.prompt_report if sequence is job.sequence else None
        adopted = sequence.adopt(self.table, min(last, final - 1))
        if adopted and not job.requeued:
            job.cached_tokens += adopted
            job.cached_pages += adopted // PAGE_SIZE
        start = sequence.stored
        if start >= last or sequence.waiting:
            return adopted > 0
        room = self.room if report is None else min(self.room, PAGE_SIZE)  # logits are large
        end = last if last - start <= room else (start + room) // PAGE_SIZE * PAGE_SIZE
        if end <= start:
            return adopted > 0
        params = self._common(sequence.block_table.unsqueeze(0), job)
        params["cache_seqlens"] = torch.tensor([start], dtype=torch.int32)
        ids = sequence.input_ids.torch()[:, start:end].clone()
        if report is None:
            self.model.prefill(ids, params)
        else:
            report.add(self.model.forward(ids, params)[0], start)
        sequence.store(self.table, end, final)
        self.prefill_tokens += end - start
        self.room -= end - start
        return True

    def decode(self, jobs: list[Job], drafts: list[list[int]]) -> Tensor:
        """Run the last token of every job and the tokens drafted for it; logits of what follows
        each, (jobs + drafted, V_pad), job by job, guided where a job is. Drafted tokens do not
        count as stored."""
        if any(drafts):
            logits = self._verify(jobs, drafts)
        elif self._ahead is not None:
            logits, self._ahead = self._ahead.take(jobs), None
        else:
            logits = self._step(jobs, {})
        for job in jobs:
            job.store(self.table)
        rows = (1 + len(draft) for draft in drafts)
        scales = (job.cfg_scale for job in jobs)
        return combine(logits[:, -1], list(zip(rows, scales, strict=True)))

    def run_ahead(self, jobs: list[Job], tokens: dict[Job, int]) -> None:
        """Queue the next step: after a job's token of this step, which its sequences do not have
        yet, or after their last one. What a model refuses comes up when the step is asked for."""
        runs = {
            job: [
                Run(
                    sequence,
                    sequence.block_table,
                    tokens.get(job, sequence.input_ids.last()),
                    len(sequence) - (job not in tokens),
                )
                for sequence in job.sequences
            ]
            for job in jobs
        }
        try:
            self._ahead = Ahead(runs, self._step(jobs, tokens))
        except (Exl3Error, RuntimeError) as error:  # out of memory, for one
            logger.warning("steps are not begun early any more, because one failed: %s", error)
            self.runs_ahead = False
            self.forget()

    def ready(self, jobs: list[Job]) -> list[Job]:
        """Those whose next step runs already; all of them, with no step ahead, if none's does."""
        served = [job for job in jobs if self._ahead is not None and self._ahead.serves(job)]
        if not served:
            self._ahead = None
        return served or jobs

    def _step(self, jobs: list[Job], tokens: dict[Job, int]) -> Tensor:
        """After the token given for a job, or after the last one."""
        sequences = [sequence for job in jobs for sequence in job.sequences]
        tables = [sequence.block_table for sequence in sequences]
        if jobs != self._jobs or any(a is not b for a, b in zip(tables, self._tables, strict=True)):
            self._set_up(jobs, tables)
        given = [tokens.get(job) for job in jobs for _ in job.sequences]
        for row, (sequence, token) in enumerate(zip(sequences, given, strict=True)):
            last = token is None
            self._ids_array[row, 0] = sequence.input_ids.last() if last else token
            self._lengths_array[row] = len(sequence) - last
        return self.model.forward(self._ids, self._params)

    def _verify(self, jobs: list[Job], drafts: list[list[int]]) -> Tensor:
        parts, owners = [], []
        for job, draft in zip(jobs, drafts, strict=True):
            for sequence in job.sequences:
                new = [sequence.input_ids.last(), *draft]
                parts.append(Part(sequence, len(sequence) - 1, new))
                owners += [job] * len(new)
        ids, params = pack(parts)
        return self.model.forward(ids, {**self._common(params["block_table"], *owners), **params})

    def forget(self, job: Job | None = None) -> None:
        """Drop references to jobs that have ended; of the step ahead, to one that has."""
        if self._ahead is not None and job is not None and not self._ahead.forget(job):
            self._ahead = None
        self._jobs, self._tables, self._params = [], [], {}

    def _set_up(self, jobs: list[Job], tables: list[Tensor]) -> None:
        self._jobs, self._tables = list(jobs), tables
        width = max(table.numel() for table in tables)
        block_table = torch.zeros(len(tables), width, dtype=torch.int32)
        for row, table in enumerate(tables):
            block_table[row, : table.numel()] = table
        self._ids = torch.zeros(len(tables), 1, dtype=torch.long)
        self._lengths = torch.zeros(len(tables), dtype=torch.int32)
        self._ids_array, self._lengths_array = self._ids.numpy(), self._lengths.numpy()
        owners = [job for job in jobs for _ in job.sequences]
        self._params = self._common(block_table, *owners)
        self._params["cache_seqlens"] = self._lengths

    def _common(self, block_table: Tensor, *jobs: Job) -> dict[str, Any]:
        params: dict[str, Any] = {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "block_table": block_table,
            "loras": [job.adapters for job in jobs],
        }
        embeddings = [item for job in dict.fromkeys(jobs) for item in job.embeddings]
        if embeddings:
            params["indexed_embeddings"] = embeddings
        return params
