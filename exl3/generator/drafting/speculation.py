"""Who is drafted in a step and how far, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Drafter
from .length import DraftLength, DraftOptions

if TYPE_CHECKING:
    from ..job import Job

# Rows of a pass that checks drafts. Up to here a row's result does not depend on how many others
# there are, so that drafting does not change a single logit; and a step stays one recorded step.
MAX_ROWS = 16


def share(wanted: list[int], rows: list[int], room: int) -> list[int]:
    """Give out `room` rows of a pass, one token after another, until every wish is met or none is
    left.

    Args:
        rows: what one token of each costs.
    """
    given = [0] * len(wanted)
    for level in range(1, max(wanted, default=0) + 1):
        for i, wish in enumerate(wanted):
            if wish >= level and rows[i] <= room:
                given[i] = level
                room -= rows[i]
    return given


class Speculation:
    """Drafting for all jobs of a generator."""

    def __init__(self, drafter: Drafter, options: DraftOptions) -> None:
        self.drafter = drafter
        self.options = options

    def admit(self, job: Job) -> None:
        """A job was enqueued."""
        job.drafted = True
        job.draft_length = DraftLength(self.options)
        self.drafter.admit(job)

    def propose(self, jobs: list[Job]) -> list[list[int]]:
        """A draft for each job that is about to decode; empty for some or all.

        The longest wish counts for all of them, as far as their limits and the rows allow.
        """
        drafts: list[list[int]] = [[] for _ in jobs]
        rows = [len(job.sequences) for job in jobs]
        if sum(rows) >= MAX_ROWS:
            return drafts
        ready = [job.draft_room() > 0 and self.drafter.can_draft(job) for job in jobs]
        wishes = [job.draft_length.next(can) for job, can in zip(jobs, ready, strict=True)]
        window = max(wishes)
        rooms = [job.draft_room() if can else 0 for job, can in zip(jobs, ready, strict=True)]
        counts = share([min(window, room) for room in rooms], rows, MAX_ROWS - sum(rows))
        chosen = [(i, job, n) for i, (job, n) in enumerate(zip(jobs, counts, strict=True)) if n]
        if not chosen:
            return drafts
        proposed = self.drafter.propose([job for _, job, _ in chosen], [n for *_, n in chosen])
        for (i, *_), draft in zip(chosen, proposed, strict=True):
            drafts[i] = draft
        return drafts

    def settle(self, job: Job, position: int, window: int, accepted: int) -> None:
        """A step of one job is over.

        Args:
            position: tokens that the job had before.
            window, accepted: tokens proposed, and how many of them were kept.
        """
        self.drafter.settle(job, position, window, accepted)
        if not window:
            return
        length = job.draft_length
        length.update(window, accepted)
        job.accepted_draft_tokens += accepted
        job.rejected_draft_tokens += window - accepted
        if self.options.record:
            job.draft_stats.append((position, window, accepted, length.ema))
