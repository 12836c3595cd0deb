"""Requests of random shape, each checked as it streams."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exl3 import ArgmaxSampler, AsyncGenerator, AsyncJob, ComboSampler, DefaultSampler

ENDS_WITHIN_S = 240.0  # a job that is not over by then counts as lost


@dataclass(slots=True)
class Finished:
    """A greedy request that ran to its end; guided if it has two prompts."""

    prompts: list[list[int]]
    scale: float
    tokens: list[int]


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    greedy: list[Finished] = field(default_factory=list)
    seen: int = 0

    def fault(self, text: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(text)

    def keep(self, done: Finished, rng: random.Random, at_most: int) -> None:
        """An even sample of all greedy requests."""
        self.seen += 1
        if len(self.greedy) < at_most:
            self.greedy.append(done)
        elif rng.random() < at_most / self.seen:
            self.greedy[rng.randrange(at_most)] = done


class Prompts:
    """Prompts of a few families that share their starts, cut from the project's own pages."""

    def __init__(self, tokenizer: Any, longest: int, seed: int) -> None:
        rng = random.Random(seed)
        pages = sorted((Path(__file__).parents[2] / "doc").rglob("*.md"))
        text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        self._ids: list[int] = tokenizer.encode(text)[0].tolist()
        self._longest = longest
        self._families = [self._cut(rng, rng.randint(50, longest * 3 // 4)) for _ in range(8)]

    def _cut(self, rng: random.Random, length: int) -> list[int]:
        start = rng.randrange(len(self._ids) - length)
        return self._ids[start : start + length]

    def next(self, rng: random.Random) -> list[int]:
        if rng.random() < 0.3:
            return self._cut(rng, rng.randint(1, self._longest // 2))
        family = rng.choice(self._families)
        start = family[: rng.choice((len(family), rng.randint(1, len(family))))]
        return start + self._cut(rng, rng.randint(1, 60))


def _arguments(rng: random.Random) -> dict[str, Any]:
    sampler = rng.choices((ArgmaxSampler(), DefaultSampler(), ComboSampler(top_k=20)), (6, 2, 2))[0]
    return {
        "sampler": sampler,
        "seed": rng.randrange(1 << 30),
        "max_new_tokens": rng.choice((1, 2, 8, 20, 40, 80, 160)),
        "max_rq_tokens": rng.choice((None, None, 1, 64)),
        "stop_conditions": rng.choice(([], [], ["\n\n"], [".", "\n"])),
        "max_skips": rng.choice((4, 4, 0)),
        "return_probs": rng.random() < 0.1,
        "cfg_scale": rng.choice((*[1.0] * 7, 1.5)),
    }


async def client(
    generator: AsyncGenerator, prompts: Prompts, tally: Tally, until: float, seed: int
) -> None:
    """One of the callers: request after request until the time is over."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        arguments = _arguments(rng)
        texts = [prompts.next(rng) for _ in range(1 if arguments["cfg_scale"] == 1 else 2)]
        name = f"{seed}:{tally.counts['requests']}"
        ids = [torch.tensor([text]) for text in texts]
        job = AsyncJob(generator, ids, identifier=name, **arguments)
        tally.counts["requests"] += 1
        try:
            await asyncio.wait_for(_one(job, name, arguments, texts, tally, rng), ENDS_WITHIN_S)
        except asyncio.TimeoutError:
            tally.fault(f"{name}: no end within {ENDS_WITHIN_S} s, state {job.job.state}")
            await job.cancel()


async def _one(
    job: AsyncJob,
    name: str,
    arguments: dict[str, Any],
    texts: list[list[int]],
    tally: Tally,
    rng: random.Random,
) -> None:
    kind = rng.choices(("read", "cancel", "late", "abandon"), (70, 20, 7, 3))[0]
    if kind == "cancel" and rng.random() < 0.5:  # at some time, in whatever state
        await asyncio.sleep(rng.choice((0, 0, rng.random() * 5)))
        await job.cancel()
        await job.cancel()
        tally.counts["cancelled"] += 1
        return
    if kind in ("late", "abandon"):  # a consumer that does not read
        await asyncio.sleep(rng.random() * 10)
        if kind == "abandon":
            await job.cancel()
            tally.counts["abandoned"] += 1
            return
    leave_after = rng.randrange(60) if kind == "cancel" else None
    text, tokens, last = "", [], None
    async for event in job:
        if event.get("identifier") != name or event["job"] is not job.job:
            tally.fault(f"{name}: got an event of {event.get('identifier')}")
        if event["stage"] != "streaming":
            continue
        text += event.get("text", "")
        tokens += event["token_ids"][0].tolist() if "token_ids" in event else []
        last = event
        if leave_after is not None and len(tokens) > leave_after and not event["eos"]:
            await job.cancel()
            tally.counts["cancelled"] += 1
            return
    _check(job, name, arguments, text, tokens, last, tally)
    if last is not None and isinstance(arguments["sampler"], ArgmaxSampler):
        tally.keep(Finished(texts, arguments["cfg_scale"], tokens), rng, 40)


def _check(
    job: AsyncJob,
    name: str,
    arguments: dict[str, Any],
    text: str,
    tokens: list[int],
    last: dict[str, Any] | None,
    tally: Tally,
) -> None:
    if last is None or not last["eos"]:
        tally.fault(f"{name}: lost, no final event")
        return
    tally.counts["finished"] += 1
    tally.counts["new_tokens"] += len(tokens)
    wanted = arguments["max_new_tokens"]
    if last["eos_reason"] not in ("max_new_tokens", "stop_token", "stop_string"):
        tally.fault(f"{name}: ended with {last['eos_reason']}: {last.get('error')}")
    if last["eos_reason"] == "max_new_tokens" and len(tokens) != wanted:
        tally.fault(f"{name}: {len(tokens)} tokens, expected {wanted}")
    if text != last["full_completion"]:
        tally.fault(f"{name}: streamed {text!r}, ended with {last['full_completion']!r}")
    ids = torch.tensor(tokens, dtype=torch.long)
    decoded = job.generator.generator.tokenizer.decode(ids) if tokens else ""
    if last["eos_reason"] == "max_new_tokens" and text != decoded:
        tally.fault(f"{name}: streamed {text!r}, the tokens are {decoded!r}")
