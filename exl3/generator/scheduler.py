"""Which jobs run: the queue and the rule by which jobs leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from .job import Job, JobState


class Scheduler:
    """Pending jobs in order of arrival, and active ones in order of start."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.pending: deque[Job] = deque()
        self.active: list[Job] = []
        self._blocked: Job | None = None  # by lack of pages, when jobs were last started

    def start(self, try_start: Callable[[Job], bool]) -> Iterator[Job]:
        """Start what fits, in queue order; each job is yielded as it starts.

        A job that does not fit the batch, where each sequence counts, or finds no pages is skipped;
        each later job that starts in its place counts. After `max_skips` of those, no later job may
        pass it.
        """
        skipped: list[Job] = []
        self._blocked = None
        for job in list(self.pending):
            places = self.max_batch_size - sum(len(other.sequences) for other in self.active)
            if places <= 0:
                return
            if len(job.sequences) > places or not try_start(job):
                skipped.append(job)
                if _is_due(job):
                    self._blocked = job
                    return
                continue
            for other in skipped:
                other.skips += 1
            self.pending.remove(job)
            self.active.append(job)
            yield job
            due = [other for other in skipped if _is_due(other)]
            if due:
                self._blocked = due[0]
                return

    def preemptable(self) -> tuple[Job | None, list[Job]]:
        """The job that nothing may pass any more and that lacks pages, and the jobs that came
        after it and run all the same, the youngest first."""
        blocked = self._blocked
        if blocked is None or blocked.state is not JobState.PENDING:
            return None, []
        passed = [job for job in self.active if job.serial_number > blocked.serial_number]
        return blocked, sorted(passed, key=lambda job: -job.serial_number)

    def requeue(self, job: Job) -> None:
        """Back to the front of the queue; but not before an older job that was there before, or
        that nothing may pass."""
        self.active.remove(job)
        place = 0
        for index, other in enumerate(self.pending):
            waits = _is_due(other) or other.requeued
            if waits and other.serial_number < job.serial_number:
                place = index + 1
        self.pending.insert(place, job)

    def remove(self, job: Job) -> bool:
        """Forget a job; True if it was active."""
        if job is self._blocked:
            self._blocked = None
        if job in self.active:
            self.active.remove(job)
            return True
        if job in self.pending:
            self.pending.remove(job)
        return False


def _is_due(job: Job) -> bool:
    return job.options.max_skips is not None and job.skips >= job.options.max_skips
