"""Which jobs run: the queue and the rule by which jobs leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .job import Job


class Scheduler:
    """Pending jobs in order of arrival, and active ones in order of start."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.pending: deque[Job] = deque()
        self.active: list[Job] = []

    def start(self, try_start: Callable[[Job], bool]) -> list[Job]:
        """Start what fits, in queue order.

        A job that does not fit is skipped; each later job that starts in its place counts. After
        `max_skips` of those, no later job may pass it.
        """
        started: list[Job] = []
        skipped: list[Job] = []
        for job in list(self.pending):
            if len(self.active) >= self.max_batch_size:
                break
            if any(_is_due(other) for other in skipped):
                break
            if not try_start(job):
                skipped.append(job)
                continue
            for other in skipped:
                other.skips += 1
            self.pending.remove(job)
            self.active.append(job)
            started.append(job)
        return started

    def requeue(self, job: Job) -> None:
        """Back to the front of the queue."""
        self.active.remove(job)
        self.pending.appendleft(job)

    def remove(self, job: Job) -> bool:
        """Forget a job; True if it was active."""
        if job in self.active:
            self.active.remove(job)
            return True
        if job in self.pending:
            self.pending.remove(job)
        return False


def _is_due(job: Job) -> bool:
    return job.options.max_skips is not None and job.skips >= job.options.max_skips
