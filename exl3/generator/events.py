"""Dictionaries that tell the caller what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .stream import Outcome, Token

if TYPE_CHECKING:
    from .job import Job

Event = dict[str, Any]


def event(job: Job, stage: str, **more: Any) -> Event:
    """The keys of every event, and more."""
    out: Event = {"job": job, "stage": stage, "eos": False, "serial": job.serial_number, **more}
    if job.identifier is not None:
        out["identifier"] = job.identifier
    return out


def _reports(tokens: list[Token], text: str) -> Event:
    """What is told about released or held tokens."""
    out: Event = {}
    if text:
        out["text"] = text
    if not tokens:
        return out
    out["token_ids"] = torch.tensor([[token.id for token in tokens]], dtype=torch.long)
    if tokens[0].prob is not None:
        out["token_probs"] = torch.tensor([[token.prob for token in tokens]], dtype=torch.float)
    if tokens[0].top is not None:
        tops = [token.top for token in tokens if token.top is not None]
        out["top_k_tokens"] = torch.cat([top[0] for top in tops], dim=1)
        out["top_k_probs"] = torch.cat([top[1] for top in tops], dim=1)
    if tokens[0].logits is not None:
        rows = [token.logits for token in tokens if token.logits is not None]
        out["logits"] = torch.cat(rows, dim=1)
    return out


def streaming(job: Job, outcome: Outcome) -> Event:
    """The event of one sampled token."""
    out = event(job, "streaming")
    out.update(_reports(outcome.released, outcome.text))
    if outcome.suppressed is not None:
        out["suppressed_text"] = outcome.suppressed_text
        out["suppressed_tokens"] = torch.tensor(
            [[token.id for token in outcome.suppressed]], dtype=torch.long
        )
    if outcome.reason is not None:
        out.update(_ending(job, outcome.reason))
        out.update(outcome.details)
        held = _reports(outcome.held, outcome.held_text)
        if held:
            out["held"] = held
    return out


def _ending(job: Job, reason: str) -> Event:
    out: Event = {
        "eos": True,
        "eos_reason": reason,
        "full_completion": job.full_completion,
        "new_tokens": job.new_tokens,
        "prompt_tokens": job.prompt_tokens,
        "time_enqueued": job.time_enqueued,
        "time_prefill": job.time_prefill,
        "time_generate": job.time_generate,
        "cached_pages": job.cached_pages,
        "cached_tokens": job.cached_tokens,
    }
    out.update(draft_figures(job))
    return out


def draft_figures(job: Job) -> Event:
    """What a final event says of drafts, if the generator drafts."""
    if not job.drafted:
        return {}
    return {
        "accepted_draft_tokens": job.accepted_draft_tokens,
        "rejected_draft_tokens": job.rejected_draft_tokens,
    }
