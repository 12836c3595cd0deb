"""Random jobs with everything that looks at single tokens: each streaming event is the same with
and without drafts, alone and together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3.generator import Filter, Generator, Job
from exl3.generator.sampler import ArgmaxSampler, ComboSampler, DefaultSampler
from tests.engine.fake import FakeCache, FakeModel, mix
from tests.engine.test_workloads import DRAFTS, MODEL, Drafts

PAGES = 6
SAMPLERS = (
    ArgmaxSampler(),
    DefaultSampler(),
    ComboSampler(rep_p=1.3, pres_p=0.5, temperature=1.2, temp_last=True),
    ComboSampler(temperature=1.5, adaptive_target=0.5),
)


class Maze(Filter):
    """What is allowed depends on every token before; complete after some tokens."""

    def __init__(self, tokenizer: Any, length: int, rolls_back: bool, **options: Any) -> None:
        self.length, self.rolls_back = length, rolls_back
        self.way: list[int] = []
        super().__init__(tokenizer, **options)

    def reset(self) -> None:
        self.way = [1]

    def allowed(self, token: int) -> bool:
        return token > 2 and mix(self.way[-1] * 1000 + token) % 3 > 0

    def accept_token(self, token: int) -> None:
        assert self.allowed(token)
        self.way.append(mix(self.way[-1] + token))

    def rollback_tokens(self, count: int) -> bool:
        if self.rolls_back:
            del self.way[-count:]
        return self.rolls_back

    def is_completed(self) -> bool:
        return len(self.way) > self.length

    def get_next_logit_mask(self) -> torch.Tensor:
        mask = torch.full((1, self.vocab_size), -torch.inf, dtype=self.logits_dtype)
        mask[0, [i for i in range(self.vocab_size) if self.allowed(i)]] = 0
        return mask


@dataclass(frozen=True)
class Wish:
    """A job and all that may happen to its tokens."""

    length: int
    limit: int
    least: int
    step: int | None
    sampler: int
    seed: int
    stops: tuple
    banned: tuple
    maze: int | None  # tokens until its filter is complete
    maze_options: tuple
    healing: bool
    loop: tuple[int, int] | None
    report: bool
    guide: tuple[int, float] | None  # length of a negative prompt, scale

    def job(self, model: FakeModel) -> Job:
        filters = []
        if self.maze is not None:
            ends, trigger, rolls_back = self.maze_options
            filters.append(
                Maze(
                    model.tokenizer,
                    self.maze,
                    rolls_back,
                    eos_after_completed=ends,
                    trigger_token=100 if trigger else None,
                )
            )
        length, scale = (0, None) if self.guide is None else self.guide
        prompts = [[3 + 97 + (i * i) % 5 for i in range(n)] for n in (self.length, length) if n]
        return Job(
            [torch.tensor([ids]) for ids in prompts],
            cfg_scale=scale,
            max_new_tokens=self.limit,
            min_new_tokens=self.least,
            max_rq_tokens=self.step,
            sampler=SAMPLERS[self.sampler],
            seed=self.seed,
            stop_conditions=list(self.stops),
            banned_strings=list(self.banned),
            filters=filters,
            token_healing=self.healing,
            stop_on_loop=self.loop,
            return_probs=self.report,
            return_top_tokens=2 * self.report,
        )


WISHES = st.builds(
    Wish,
    length=st.sampled_from([1, 7, 240, 250, 255, 256, 257, 300, 510]),
    limit=st.sampled_from([1, 2, 3, 9, 40, 120]),
    least=st.sampled_from([0, 0, 3, 20]),
    step=st.sampled_from([None, None, 1]),
    sampler=st.integers(0, len(SAMPLERS) - 1),
    seed=st.integers(0, 99),
    stops=st.sampled_from([(), (1,), ("ab",), ("é", 1), ("abca", "bc"), (1, 2, "\n")]),
    banned=st.sampled_from([(), (), ("ab",), ("c ", "Bc"), ("é", "a\n"), ("abc", " a b")]),
    maze=st.sampled_from([None, None, 2, 11]),
    maze_options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    healing=st.booleans(),
    loop=st.sampled_from([None, None, (8, 2)]),
    report=st.booleans(),
    guide=st.sampled_from([None, None, (1, 3.0), (254, 0.5), (300, 1.3)]),
)

LEFT_OUT = {"job", "serial", "time_enqueued", "time_prefill", "time_generate"}
LEFT_OUT |= {"cached_pages", "cached_tokens", "accepted_draft_tokens", "rejected_draft_tokens"}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return repr(value) if isinstance(value, Exception) else value


def streamed(events: list[dict]) -> list[dict]:
    return [
        {key: plain(value) for key, value in event.items() if key not in LEFT_OUT}
        for event in events
        if event["stage"] == "streaming"
    ]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(wishes=st.lists(WISHES, min_size=1, max_size=4), drafts=DRAFTS)
def test_every_event_is_the_same(wishes: list[Wish], drafts: Drafts) -> None:
    wants = []
    for wish in wishes:
        alone = Generator(MODEL, FakeCache(MODEL, PAGES * 256), MODEL.tokenizer)
        alone.enqueue(wish.job(MODEL))
        wants.append([])
        while alone.num_remaining_jobs():
            wants[-1] += alone.iterate()
    cache = FakeCache(MODEL, PAGES * 256)
    generator = Generator(MODEL, cache, MODEL.tokenizer, **drafts.arguments(PAGES))
    jobs = [wish.job(MODEL) for wish in wishes]
    got: dict[Job, list[dict]] = {item: [] for item in jobs}
    generator.enqueue(jobs)
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            got[event["job"]].append(event)
        generator.check_integrity()
    assert generator.pagetable.num_free == PAGES
    for want, events in zip(wants, got.values(), strict=True):
        assert streamed(events) == streamed(want)
