"""Drawing the tokens of a step: on a device where it can be, for all jobs at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.sampling import RowPlan, sample
from ..sampling.device import row_plan
from .job import Job
from .reports import Rows


def draw_together(
    jobs: Sequence[Job], drafts: Sequence[Sequence[int]], logits: Rows
) -> list[int | None]:
    """A token for each row of logits, or None where `draw_one` must draw it.

    A job has a row for its next token and one more for each drafted token. On a device only the
    tokens travel to the host, not the logits.
    """
    if not logits.raw.is_cuda:
        best = logits.best() if all(job.is_plain_greedy() for job in jobs) else None
        return [None] * len(logits.raw) if best is None else list(best)
    plans: dict[int, RowPlan] = {}
    row = 0
    for job, draft in zip(jobs, drafts, strict=True):
        plan = _plan(job, logits)
        if plan is not None:
            # Rows of drafted tokens need the keys and masks of their time, but the greatest needs
            # neither.
            known = 1 + len(draft) if job.is_plain_greedy() else 1
            plans |= dict.fromkeys(range(row, row + known), plan)
        row += 1 + len(draft)
    return _on_device(plans, logits)


def draw_one(job: Job, logits: Rows, row: int) -> int:
    """The next token of a job from one row.

    Raises:
        NothingToSampleError: no token can be drawn.
        FilterError: a filter failed.
    """
    plan = _plan(job, logits) if logits.raw.is_cuda else None
    token = None if plan is None else _on_device({row: plan}, logits)[row]
    return job.choose(logits, row) if token is None else token


def _plan(job: Job, logits: Rows) -> RowPlan | None:
    draw = job.plan_draw()
    if draw is None:
        return None
    return row_plan(
        draw.sampler, key=draw.key, past_ids=draw.past_ids, mask=draw.mask, width=logits.columns
    )


def _on_device(plans: dict[int, RowPlan], logits: Rows) -> list[int | None]:
    """Tokens of the rows that have a plan; None for those that must be judged on the host."""
    tokens: list[int | None] = [None] * len(logits.raw)
    if plans:
        rows = list(plans)
        chosen = logits.raw if len(rows) == len(tokens) else logits.raw[rows]
        drawn = sample(chosen, logits.columns, list(plans.values())).tolist()
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = None if token < 0 else token
    return tokens
