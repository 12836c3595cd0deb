"""A decode step that runs on a device while the host looks at the tokens of the one before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .job import Job
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Run:
    """The token of a sequence that was run, and where."""

    sequence: Sequence
    block_table: Tensor
    token: int
    place: int

    @property
    def holds(self) -> bool:
        """Whether this is still what the sequence needs next: no token was taken back, and its
        pages are the same."""
        sequence = self.sequence
        return (
            sequence.block_table is self.block_table
            and len(sequence) == self.place + 1
            and sequence.input_ids.last() == self.token
        )


class Ahead:
    """Logits of what follows the last token of some jobs.

    Args:
        runs: of each job's sequences.
        logits: a row for each sequence, job by job.
    """

    def __init__(self, runs: dict[Job, list[Run]], logits: Tensor) -> None:
        self._logits = logits
        self._rows: dict[Job, tuple[int, list[Run]]] = {}
        row = 0
        for job, own in runs.items():
            self._rows[job] = row, own
            row += len(own)

    def serves(self, job: Job) -> bool:
        """Whether the job's next step is here."""
        found = self._rows.get(job)
        return found is not None and all(run.holds for run in found[1])

    def forget(self, job: Job) -> bool:
        """The job has ended, or given its pages back; False if it was the last one."""
        self._rows.pop(job, None)
        return bool(self._rows)

    def take(self, jobs: list[Job]) -> Tensor:
        """The rows of these jobs, in their order."""
        rows = [row + i for row, own in map(self._rows.__getitem__, jobs) for i in range(len(own))]
        first, last = rows[0], rows[-1]
        if rows == list(range(first, last + 1)):
            return self._logits[first : last + 1]
        # A blocking copy would wait for the step.
        return self._logits[torch.tensor(rows).to(self._logits.device, non_blocking=True)]
