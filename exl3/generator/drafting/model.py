"""Drafts from a smaller model, which continues each text greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...constants import PAGE_SIZE
from ...ops.sampling import argmax
from ..packing import Part, pack
from ..sequence import Sequence

if TYPE_CHECKING:
    from ..job import Job

_CHUNK = 2048  # prompt tokens of one pass
_FEW = 4  # tokens that are caught up with in the first step of a draft, not in a pass before


class ModelDrafter:
    """A model with a cache of its own, whose pages hold the same tokens as the main cache's.

    `Sequence.mirrored` counts the leading tokens that both have. It may fall behind in a page that
    only its job uses; a page that others may share is brought up to date at once. A negative
    prompt is not continued, only kept up to date.

    Args:
        vocab: ids below it can be proposed; `known`: ids below it can be read.
    """

    def __init__(self, model: Any, cache: Any, vocab: int) -> None:
        self.model, self.cache = model, cache
        self.known = int(model.config.vocab_size)
        self.vocab = min(vocab, self.known)

    def admit(self, job: Job) -> None:
        """See `Drafter.admit`; what is known is in the job's sequences."""

    def start(self, job: Job) -> None:
        """See `Drafter.start`; what the pages hold is in both caches."""
        for sequence in job.sequences:
            sequence.mirrored = sequence.stored

    def follow(self, job: Job) -> None:
        """See `Drafter.follow`."""
        for sequence in job.sequences:
            self._catch_up(sequence, sequence.stored)

    def can_draft(self, job: Job) -> bool:
        """See `Drafter.can_draft`: not once there is an image, or a token that only the main
        model has."""
        return self._readable(job.sequence) == len(job.sequence)

    def _readable(self, sequence: Sequence) -> int:
        """Leading tokens that the draft model can read."""
        count, length = min(sequence.readable, len(sequence)), len(sequence)
        ids = sequence.input_ids.numpy()[count:length]
        strange = np.flatnonzero((ids < 0) | (ids >= self.known))
        sequence.readable = count + int(strange[0]) if strange.size else length
        return sequence.readable

    def _catch_up(self, sequence: Sequence, end: int) -> None:
        """Run the tokens up to `end` that only the main cache has; from one that cannot be read
        on, nothing is run: whoever shares those pages is not drafted either."""
        last = min(end, self._readable(sequence))
        ids = sequence.input_ids.torch()
        start = sequence.mirrored
        while start < last:
            stop = min(last, (start + _CHUNK) // PAGE_SIZE * PAGE_SIZE)
            _, params = pack([Part(sequence, start, [0])])
            self.model.prefill(ids[:, start:stop].clone(), {**params, "cache": self.cache})
            start = stop
        sequence.mirrored = max(sequence.mirrored, end)

    def propose(self, jobs: list[Job], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`; one pass for each token of the longest draft."""
        for job in jobs:
            if len(job.sequence) - job.sequence.mirrored > _FEW:
                self._catch_up(job.sequence, len(job.sequence) - 1)
        parts = []
        for job in jobs:
            start = job.sequence.mirrored
            parts.append(Part(job.sequence, start, job.sequence.input_ids.numpy()[start:]))
        drafts: list[list[int]] = [[] for _ in jobs]
        ends = np.cumsum([len(part.ids) for part in parts]) - 1
        going = list(range(len(jobs)))
        for step in range(max(counts)):
            if step:
                going = [i for i in going if counts[i] > step]
                parts = [
                    Part(jobs[i].sequence, len(jobs[i].sequence) + step - 1, drafts[i][-1:])
                    for i in going
                ]
                ends = np.arange(len(going))
            for i, token in zip(going, self._best(parts, ends), strict=True):
                drafts[i].append(token)
        return drafts

    def _best(self, parts: list[Part], rows: Any) -> list[int]:
        """The likeliest token after each of these rows of a pass."""
        ids, params = pack(parts)
        logits = self.model.forward(ids, {**params, "cache": self.cache})[:, -1]
        if logits.is_cuda:
            best = argmax(logits.float(), self.vocab).tolist()
            return [best[row] for row in rows]
        table = logits.to(torch.float32).numpy()
        return [int(table[row, : self.vocab].argmax()) for row in rows]

    def settle(self, job: Job, position: int, window: int, accepted: int) -> None:
        """See `Drafter.settle`."""
        if window:  # the last drafted token has not been run here; wrong ones will be run over
            right = position + min(accepted, window - 1)
            job.sequence.mirrored = min(right, job.sequence.stored)
        for sequence in job.sequences:
            self._share(sequence)

    def _share(self, sequence: Sequence) -> None:
        """A full page may be shared, others copied in part: what they hold must be in both caches.
        Where the draft model cannot read on, nothing is left to run."""
        readable = self._readable(sequence) == len(sequence)
        due = sequence.stored // PAGE_SIZE * PAGE_SIZE if readable else sequence.stored
        if sequence.mirrored < due:
            self._catch_up(sequence, due)
        sequence.limit_copies(sequence.mirrored)
