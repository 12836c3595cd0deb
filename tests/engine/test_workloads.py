"""Random workloads: whatever runs around a request, it gets what it gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3.generator import Generator, Job
from exl3.generator.sampler import ArgmaxSampler, ComboSampler, DefaultSampler
from tests.engine.fake import PAGE_BYTES, FakeCache, FakeModel, drafting
from tests.engine.reference import run_alone
from tests.engine.test_generator import job, text, tokens

SAMPLERS = (
    ArgmaxSampler(),
    DefaultSampler(),
    ComboSampler(rep_p=1.2, temperature=1.1, top_k=6, temp_last=True),
)
MODEL = FakeModel(letters=b"abc\xc3\xa9 \n", eos_bias=3.0)


def shared(family: int, length: int) -> list[int]:
    return [3 + 97 + (family + i * i) % 7 for i in range(length)]


@dataclass(frozen=True)
class Request:
    """One request of a workload; prompts of one family share their start."""

    family: int
    length: int
    tail: int
    limit: int
    step: int | None
    sampler: int
    stops: tuple
    chunk_after: int  # steps before it is enqueued
    cancel_after: int | None  # steps after that, until it is cancelled
    guide: tuple[int, int, float] | None = None  # family and length of a negative prompt, scale

    def prompt(self) -> list[int]:
        return shared(self.family, self.length) + [3 + 97 + self.tail] * (self.tail % 3)

    def negative(self) -> list[int] | None:
        return None if self.guide is None else shared(*self.guide[:2])

    def scale(self) -> float | None:
        return None if self.guide is None else self.guide[2]

    def prompts(self) -> list[list[int]]:
        negative = self.negative()
        return [self.prompt()] if negative is None else [self.prompt(), negative]

    def prompts_run(self) -> list[list[int]]:
        return self.prompts()[: 1 if self.scale() == 1.0 else 2]


LENGTHS = st.sampled_from([1, 5, 100, 254, 255, 256, 257, 258, 300, 511, 512, 513])
GUIDES = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.integers(0, 1), LENGTHS, st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0])),
)
STOPS = st.sampled_from([(), (1,), ("ab",), ("é", 1), ("abca", "bc"), ("\n",)])
REQUESTS = st.builds(
    Request,
    family=st.integers(0, 1),
    length=LENGTHS,
    tail=st.integers(0, 5),
    limit=st.sampled_from([1, 2, 7, 30, 270]),
    step=st.sampled_from([None, 1, 40, 256]),
    sampler=st.integers(0, 2),
    stops=STOPS,
    chunk_after=st.sampled_from([0, 0, 1, 3, 20]),
    cancel_after=st.sampled_from([None, None, None, 0, 1, 2, 9]),
    guide=GUIDES,
)


@dataclass(frozen=True)
class Drafts:
    """How a generator drafts."""

    kind: str
    tokens: int
    dynamic: bool
    wrong_percent: int

    def arguments(self, pages: int) -> dict:
        options = {"num_draft_tokens": self.tokens, "dynamic_draft_tokens": self.dynamic}
        if self.kind == "model":
            options["wrong_percent"] = self.wrong_percent
        return drafting(MODEL, pages, self.kind, **options)


DRAFTS = st.builds(
    Drafts,
    kind=st.sampled_from(["none", "ngram", "model", "model"]),
    tokens=st.sampled_from([1, 2, 5, 16]),
    dynamic=st.booleans(),
    wrong_percent=st.sampled_from([0, 10, 50, 100]),
)


def fits(request: Request, pages: int, batch: int = 256) -> bool:
    prompts = request.prompts_run()
    needed = sum(-(-(len(ids) + request.limit - 1) // 256) for ids in prompts)
    return needed <= pages and len(prompts) <= batch


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=7),
    pages=st.integers(4, 12),
    batch=st.integers(1, 4),
    chunk=st.sampled_from([256, 512, 2048]),
    drafts=DRAFTS,
)
def test_any_workload(
    requests: list[Request], pages: int, batch: int, chunk: int, drafts: Drafts
) -> None:
    generator = Generator(
        MODEL,
        FakeCache(MODEL, pages * 256),
        MODEL.tokenizer,
        max_batch_size=batch,
        max_chunk_size=chunk,
        **drafts.arguments(pages),
    )
    play(generator, [r for r in requests if fits(r, pages, batch)])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=7),
    pages=st.integers(4, 6),
    batch=st.integers(1, 4),
    host=st.sampled_from([0, 2, 3, 12]),
    files=st.sampled_from([0, 2, 5, 100]),
    drafts=DRAFTS,
)
def test_any_workload_over_tiers_and_a_restart(
    requests: list[Request], pages: int, batch: int, host: int, files: int, drafts: Drafts
) -> None:
    page_bytes = PAGE_BYTES * (2 if drafts.kind == "model" else 1)
    requests = [r for r in requests if fits(r, pages, batch)]
    with TemporaryDirectory() as folder:
        for _ in range(2):
            generator = Generator(
                MODEL,
                FakeCache(MODEL, pages * 256),
                MODEL.tokenizer,
                max_batch_size=batch,
                cpu_cache_size=host * page_bytes,
                disk_cache_dir=folder if files else None,
                disk_cache_size=files * (page_bytes + 2200),
                **drafts.arguments(pages),
            )
            play(generator, requests)
            play(generator, requests[::-1])
            generator.close()


def test_any_workload_under_pressure() -> None:
    preemptions: list[int] = []
    _under_pressure(preemptions)
    assert sum(preemptions) > 5  # the workloads do what they are for


@settings(
    max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([20, 255, 300, 600, 900]),
            st.sampled_from([3, 60, 150]),
            st.sampled_from([None, None, 1, 100]),
            st.sampled_from([0, 1, 5]),
            st.sampled_from([None, None, None, (0, 10, 2.0), (1, 300, 1.5)]),
        ),
        min_size=4,
        max_size=12,
    ),
    pages=st.integers(4, 6),
    host=st.sampled_from([0, 6]),
    skips=st.sampled_from([0, 1, 2]),
    drafts=DRAFTS,
)
def _under_pressure(preemptions, shapes, pages: int, host: int, skips: int, drafts) -> None:
    """More than fits by far, hardly anybody may be passed: the youngest must give way."""
    requests = [
        Request(i % 3, length, i, limit, step, i % 3, (), start, None, guide)
        for i, (length, limit, step, start, guide) in enumerate(shapes)
    ]
    page_bytes = PAGE_BYTES * (2 if drafts.kind == "model" else 1)
    generator = Generator(
        MODEL,
        FakeCache(MODEL, pages * 256),
        MODEL.tokenizer,
        cpu_cache_size=host * page_bytes,
        **drafts.arguments(pages),
    )
    play(generator, [r for r in requests if fits(r, pages)], skips)
    preemptions.append(generator.metrics["preemptions"])


def play(generator: Generator, requests: list[Request], skips: int = 4) -> None:
    """Run a workload; every request must get what it gets alone."""
    jobs: dict[int, Job] = {}
    events: dict[int, list[dict]] = {i: [] for i in range(len(requests))}
    cancelled, step = set(), 0
    while len(jobs) < len(requests) or generator.num_remaining_jobs():
        for i, request in enumerate(requests):
            if i not in jobs and request.chunk_after <= step:
                jobs[i] = Job(
                    [torch.tensor([ids]) for ids in request.prompts()],
                    cfg_scale=request.scale(),
                    max_new_tokens=request.limit,
                    max_rq_tokens=request.step,
                    max_skips=skips,
                    sampler=SAMPLERS[request.sampler],
                    seed=i,
                    stop_conditions=list(request.stops),
                    identifier=i,
                )
                generator.enqueue(jobs[i])
            late = request.chunk_after + (request.cancel_after or 0)
            if request.cancel_after is not None and step == late:
                generator.cancel(jobs[i])
                cancelled.add(i)
        for event in generator.iterate():
            assert (
                not event["job"].is_finished
                or event["identifier"] not in cancelled
                or (event["eos"] or event["job"].is_finished)
            )
            events[event["identifier"]].append(event)
        generator.check_integrity()
        step += 1
        assert step < 5000
    assert generator.pagetable.num_free == generator.pagetable.max_pages
    for i, request in enumerate(requests):
        mine = events[i]
        ended = bool(mine) and mine[-1]["eos"]
        want = run_alone(
            MODEL,
            request.prompt(),
            request.limit,
            sampler=SAMPLERS[request.sampler],
            seed=i,
            stops=request.stops,
            negative=request.negative(),
            scale=request.scale(),
        )
        if not ended:
            assert i in cancelled
            assert want[0][: len(tokens(mine))] == tokens(mine)
            continue
        got = (tokens(mine), text(mine), mine[-1]["eos_reason"])
        assert got == want
        assert mine[-1]["full_completion"] == want[1]
        total = sum(map(len, request.prompts_run()))
        assert mine[-1]["cached_tokens"] < total
        assert mine[-1]["prompt_tokens"] == total


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    banned=st.lists(
        st.sampled_from(["ab", "Bc", "c ", "é", "a\n", " a b"]), min_size=1, max_size=3
    ),
    step=st.sampled_from([None, 1]),
    length=st.sampled_from([3, 230, 250, 255]),
    seed=st.integers(0, 1000),
    drafts=DRAFTS,
)
def test_banned_strings_never_appear(banned, step, length: int, seed: int, drafts: Drafts) -> None:
    generator = Generator(MODEL, FakeCache(MODEL, 1024), MODEL.tokenizer, **drafts.arguments(4))
    item = job(
        [3 + 97 + (i * i) % 7 for i in range(length)],
        max_new_tokens=60,
        max_rq_tokens=step,
        banned_strings=banned,
        sampler=DefaultSampler(),
        seed=seed,
    )
    generator.enqueue(item)
    events = []
    while generator.num_remaining_jobs():
        events += generator.iterate()
        generator.check_integrity()
    said = events[-1]["full_completion"]
    assert text(events) == said
    assert not [b for b in banned if b.lower() in said.lower()]
    # Exactly the tokens that were told, one place of the cache for each.
    assert len(tokens(events)) == events[-1]["new_tokens"]
    if events[-1]["eos_reason"] == "max_new_tokens":
        assert events[-1]["new_tokens"] == 60
    ids = item.sequences[0].input_ids.torch()[0, length:].tolist()
    assert ids == tokens(events)
