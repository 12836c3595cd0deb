"""`Drafter`: what guesses tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..job import Job


class Drafter(Protocol):
    """Guesses how jobs go on. A guess costs time if it is wrong, never a token: the model checks
    each. What a drafter keeps for a job is in `job.draft_state` or its sequences."""

    def admit(self, job: Job) -> None:
        """The job was enqueued."""

    def start(self, job: Job) -> None:
        """The job has taken pages for a round."""

    def follow(self, job: Job) -> None:
        """The job has ingested a chunk of its prompt."""

    def can_draft(self, job: Job) -> bool:
        """Whether there is something to propose for this job now."""

    def propose(self, jobs: list[Job], counts: list[int]) -> list[list[int]]:
        """What may follow each job's last token: at most `counts[i]` >= 1 ids for `jobs[i]`.
        Its pages have room for them."""

    def settle(self, job: Job, position: int, window: int, accepted: int) -> None:
        """A step is over: of `window` tokens proposed at `position` the first `accepted` were
        right. Called for jobs without a draft too, with 0 and 0."""
