"""The generator on a model that notices every mistake with pages."""

from __future__ import annotations

import pytest
import torch

from exl3.errors import CacheFullError, ConfigError, UnsupportedError
from exl3.generator import Generator, Job
from exl3.generator.sampler import (
    SS_DRY,
    ArgmaxSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    SS_AdaptiveP,
    SS_Base,
    SS_DynaTemp,
    SS_Mirostat,
    SS_Sample,
    SS_TopNSigma,
    SS_TypicalP,
)
from tests.engine.fake import FakeCache, FakeModel
from tests.engine.reference import run_alone

LETTERS = b"abcdef \n"


def prompt(length: int, start: int = 0) -> list[int]:
    return [3 + 97 + (start + i * i) % 7 for i in range(length)]


def job(ids, **kwargs) -> Job:
    kwargs.setdefault("sampler", ArgmaxSampler())
    kwargs.setdefault("max_new_tokens", 10)
    return Job(torch.tensor([ids]), **kwargs)


def run(generator: Generator, *jobs: Job, check: bool = True) -> dict[Job, list[dict]]:
    generator.enqueue(list(jobs))
    events: dict[Job, list[dict]] = {item: [] for item in jobs}
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            events[event["job"]].append(event)
        if check:
            generator.check_integrity()
    return events


def tokens(events: list[dict]) -> list[int]:
    return [i for e in events if "token_ids" in e for i in e["token_ids"][0].tolist()]


def text(events: list[dict]) -> str:
    return "".join(e.get("text", "") for e in events if e["stage"] == "streaming")


def expect_alone(generator, item, events, ids, limit, sampler=None, **kwargs) -> None:
    want = run_alone(generator.model, ids, limit, sampler=sampler or ArgmaxSampler(), **kwargs)
    last = events[-1]
    assert (tokens(events), text(events), last["eos_reason"]) == want
    assert last["full_completion"] == want[1]


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 258, 511, 512, 513, 700])
@pytest.mark.parametrize("limit", [1, 2, 20])
def test_a_request_alone(make, length: int, limit: int) -> None:
    generator = make(4)
    item = job(prompt(length), max_new_tokens=limit)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, prompt(length), limit)
    assert events[-1]["new_tokens"] == limit and events[-1]["prompt_tokens"] == length
    assert [e["stage"] for e in events].count("started") == 1


def test_event_keys(make) -> None:
    generator = make()
    item = job(prompt(300), max_new_tokens=3, identifier="me")
    events = run(generator, item)[item]
    base = {"job", "stage", "eos", "serial", "identifier"}
    assert [set(e) - base for e in events] == [
        set(),
        {"curr_progress", "max_progress"},
        {"text", "token_ids"},
        {"text", "token_ids"},
        {"text", "token_ids"}
        | {"eos_reason", "full_completion", "new_tokens", "prompt_tokens", "time_enqueued"}
        | {"time_prefill", "time_generate", "cached_pages", "cached_tokens"},
    ]
    assert events[1]["curr_progress"] == events[1]["max_progress"] == 299
    assert all(isinstance(events[-1][f"time_{k}"], float) for k in ("enqueued", "prefill"))
    assert item.is_finished and item.serial_number == 0


@pytest.mark.parametrize("second", [100, 256, 257, 300, 512, 513, 600, 601, 900])
def test_warm_cache_is_cold_cache(make, second: int) -> None:
    generator = make(8)
    first = job(prompt(600))
    run(generator, first)
    ids = prompt(second)
    item = job(ids)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, ids, 10)
    whole = min(second - 1, 609) // 256
    assert events[-1]["cached_pages"] == whole
    assert events[-1]["cached_tokens"] == min(second - 1, 600)
    prefilled = any(e["stage"] == "prefill" for e in events)
    assert prefilled == (second > 601)


def test_two_jobs_share_a_prefix(make) -> None:
    generator = make(16, max_chunk_size=256)
    a, b = job(prompt(600)), job([*prompt(600), 100, 101])
    events = run(generator, a, b)
    expect_alone(generator, a, events[a], prompt(600), 10)
    expect_alone(generator, b, events[b], [*prompt(600), 100, 101], 10)
    assert events[b][-1]["cached_tokens"] >= 256


def test_batched_is_single(make) -> None:
    generator = make(24)
    jobs = {}
    for i in range(7):
        ids = prompt(40 + 90 * i, i)
        jobs[job(ids, max_new_tokens=5 + 6 * i, sampler=DefaultSampler(), seed=i)] = (ids, i)
    events = run(generator, *jobs)
    for item, (ids, i) in jobs.items():
        expect_alone(generator, item, events[item], ids, 5 + 6 * i, DefaultSampler(), seed=i)


def test_exact_fit_and_one_more(make) -> None:
    generator = make(2)
    item = job(prompt(500), max_new_tokens=13)  # 500 + 13 - 1 = 512
    expect_alone(generator, item, run(generator, item)[item], prompt(500), 13)
    with pytest.raises(CacheFullError, match="cannot be enqueued"):
        generator.enqueue(job(prompt(500), max_new_tokens=14))
    with pytest.raises(AssertionError):
        generator.enqueue(job(prompt(513), max_new_tokens=1))
    item = job(prompt(512), max_new_tokens=1)
    expect_alone(generator, item, run(generator, item)[item], prompt(512), 1)
    assert generator.num_remaining_jobs() == 0


@pytest.mark.parametrize("length", [1, 200, 512, 513])
def test_no_new_tokens(make, length: int) -> None:
    generator = make(2)
    item = job(prompt(length), max_new_tokens=0)
    events = run(generator, item)[item]
    assert [e["eos"] for e in events].count(True) == 1
    assert events[-1]["eos_reason"] == "max_new_tokens" and events[-1]["new_tokens"] == 0
    assert not tokens(events)
    if length == 200:  # twice: the prompt is cached now
        again = job(prompt(length), max_new_tokens=0)
        assert run(generator, again)[again][-1]["eos"]


def test_without_a_limit_until_the_cache_is_full(make) -> None:
    generator = make(2)
    ids = prompt(400)
    item = job(ids, max_new_tokens=None)
    events = run(generator, item)[item]
    assert events[-1]["cache_full"] is True
    expect_alone(generator, item, events, ids, 512 - 400 + 1)


@pytest.mark.parametrize("step", [1, 100, 256, 300])
@pytest.mark.parametrize("length", [1, 255, 257, 300])
def test_requeue_changes_nothing(make, step: int, length: int) -> None:
    generator = make(8)
    ids = prompt(length)
    sampler = ComboSampler(rep_p=1.1, temperature=0.9, top_k=5)
    item = job(ids, max_new_tokens=600, max_rq_tokens=step, sampler=sampler, seed=3)
    generator.enqueue(item)
    generator.iterate()
    window = -(-(length - 1 + step) // 256) * 256
    assert item.total_pages == window // 256
    events = []
    while generator.num_remaining_jobs():
        events += generator.iterate()
    requeues = [e for e in events if e.get("requeue")]
    assert requeues and not any(e["eos"] for e in requeues)
    assert len(requeues) == len([e for e in events if e["stage"] == "started"])
    last = events[-1]
    assert (last["new_tokens"], last["prompt_tokens"], last["cached_tokens"]) == (600, length, 0)
    want = run_alone(generator.model, ids, 600, sampler=sampler, seed=3)
    assert last["full_completion"] == want[1]


@pytest.mark.parametrize("rq", [None, 100])
def test_samplers_with_memory_are_the_same_in_a_batch(make, rq) -> None:
    """Each job has its own: alone, among others, and requeued."""
    generator = make(16)
    samplers = [
        CustomSampler([SS_DRY(0.8, sequence_breakers=[3 + 97]), SS_Sample()]),
        CustomSampler([SS_DRY(2.0, 1.2, 1, 50), SS_TypicalP(0.9), SS_Mirostat(3.0, 0.3)]),
        CustomSampler([SS_TopNSigma(1.5), SS_DynaTemp(0.3, 2.0), SS_AdaptiveP(0.4, 0.8)]),
    ]
    jobs = {
        job(prompt(30 + i, i), max_new_tokens=300, sampler=s, seed=i, max_rq_tokens=rq): (i, s)
        for i, s in enumerate(samplers + samplers)
    }
    events = run(generator, *jobs, check=False)
    for item, (i, sampler) in jobs.items():
        expect_alone(generator, item, events[item], prompt(30 + i, i), 300, sampler, seed=i)


def test_requeue_may_end_with_a_full_cache(make) -> None:
    generator = make(2)
    item = job(prompt(300), max_new_tokens=1000, max_rq_tokens=64)
    events = run(generator, item)[item]
    assert events[-1]["eos_reason"] == "max_new_tokens" and events[-1]["cache_full"]
    assert events[-1]["new_tokens"] == 512 - 300 + 1


def test_evicted_pages_are_recomputed(make) -> None:
    generator = make(3)
    for round in range(3):
        for start in range(4):
            item = job(prompt(500, start))
            events = run(generator, item)[item]
            expect_alone(generator, item, events, prompt(500, start), 10)
            if round == 0:
                assert events[-1]["cached_pages"] == 0


def test_cancel_in_every_state(make) -> None:
    generator = make(6, max_batch_size=2, max_chunk_size=256)
    stay = job(prompt(300, 5), max_new_tokens=40)
    doomed = [job(prompt(700, i), max_new_tokens=30) for i in range(3)]
    generator.enqueue([stay, *doomed])
    events = generator.iterate()
    assert not doomed[0].is_prefill_done() and doomed[1] in generator.pending_jobs
    generator.cancel(doomed[1])
    generator.cancel(doomed[0])
    events += generator.iterate() + generator.iterate() + generator.iterate() + generator.iterate()
    assert doomed[2].is_prefill_done() and doomed[2].new_tokens
    generator.cancel(doomed[2])
    generator.cancel(doomed[2])
    generator.cancel(job(prompt(3)))
    while generator.num_remaining_jobs():
        events += generator.iterate()
    generator.cancel(stay)
    mine = [e for e in events if e["job"] is stay]
    expect_alone(generator, stay, mine, prompt(300, 5), 40)
    assert all(item.is_finished for item in doomed)
    assert generator.pagetable.num_free == 6


def test_start_order_and_skips(make) -> None:
    generator = make(4)
    running = job(prompt(500), max_new_tokens=60)
    big = job(prompt(900, 1), max_new_tokens=20, max_skips=2)
    small = [job(prompt(20, i), max_new_tokens=3) for i in range(5)]
    generator.enqueue([running, big, *small])
    order = []
    while generator.num_remaining_jobs():
        order += [e["job"] for e in generator.iterate() if e["stage"] == "started"]
    assert order[:3] == [running, *small[:1]] or order[:3] == [running, *small[:2]]
    assert order.index(big) == 3
    assert set(order) == {running, big, *small}


class Broken(SS_Base):
    def apply(self, row) -> None:
        raise RuntimeError("broken step")

    def is_final(self) -> bool:
        return True


def test_a_broken_job_leaves_the_others_running(make) -> None:
    from exl3.generator.sampler import CustomSampler

    generator = make()
    good, bad = job(prompt(30)), job(prompt(40), sampler=CustomSampler([Broken()]))
    events = run(generator, good, bad)
    expect_alone(generator, good, events[good], prompt(30), 10)
    assert events[bad][-1]["eos"] and "broken step" in events[bad][-1]["error"]


def test_everything_masked_ends_the_job(make) -> None:
    from exl3.generator.sampler import CustomSampler, SS_Argmax, SS_BanTokens

    generator = make()
    item = job(prompt(30), sampler=CustomSampler([SS_BanTokens(range(400)), SS_Argmax()]))
    last = run(generator, item)[item][-1]
    assert last["eos_reason"] == "end_filter" and "masked" in last["filter_error"]


def test_an_engine_failure_surfaces_and_a_new_generator_starts_clean(make) -> None:
    generator = make(4)
    item = job(prompt(300), max_new_tokens=50)
    generator.enqueue(item)
    generator.iterate()
    generator.model.fail_next = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        generator.iterate()
    second = Generator(generator.model, generator.cache, generator.tokenizer)
    with pytest.raises(ConfigError, match="newer Generator"):
        generator.iterate()
    generator.cancel(item)
    assert second.pagetable.num_free == 4
    again = job(prompt(300), max_new_tokens=50)
    expect_alone(second, again, run(second, again)[again], prompt(300), 50)


def test_bad_requests(make) -> None:
    generator = make()
    with pytest.raises(ValueError):
        Job(torch.zeros(1, 0, dtype=torch.long))
    for bad in (
        {"max_new_tokens": -1},
        {"max_rq_tokens": 0},
        {"stop_on_loop": (2, 2)},
        {"stop_on_loop": 5},
        {"stop_on_loop": (9, 2, 1)},
    ):
        with pytest.raises(ValueError):
            job(prompt(3), **bad)
    with pytest.raises(ConfigError, match="prompt token 1"):
        generator.enqueue(job([5, 9999]))
    with pytest.raises(UnsupportedError, match="text only"):
        generator.enqueue(job(prompt(3), embeddings=[object()]))
    with pytest.raises(ConfigError, match="stop_conditions"):
        generator.enqueue(job(prompt(3), stop_conditions=[1.5]))
    item = job(prompt(3))
    run(generator, item)
    with pytest.raises(ConfigError, match="before"):
        generator.enqueue(item)
    assert generator.num_remaining_jobs() == 0


@pytest.mark.parametrize("wrong", [None, "Hello", 3, [None], ["Hello"]])
def test_enqueue_wants_jobs(make, wrong) -> None:
    generator = make()
    with pytest.raises(ConfigError, match="expected a Job or a list"):
        generator.enqueue(wrong)
    assert generator.num_remaining_jobs() == 0


@pytest.mark.parametrize("wrong", ["greedy", 0.7, ArgmaxSampler, object()])
def test_job_wants_a_sampler(wrong) -> None:
    with pytest.raises(ConfigError, match="expected a Sampler object"):
        job(prompt(3), sampler=wrong)


def test_job_wants_filters() -> None:
    with pytest.raises(ConfigError, match="derived from Filter"):
        job(prompt(3), filters=["json"])


def test_generator_names_the_argument_that_is_wrong(make) -> None:
    generator = make()
    parts = {"model": generator.model, "cache": generator.cache, "tokenizer": generator.tokenizer}
    for name in parts:
        for wrong in (None, "text", *(part for key, part in parts.items() if key != name)):
            with pytest.raises(ConfigError, match=rf"\(model, cache, tokenizer\): {name} is"):
                Generator(**{**parts, name: wrong})
    for name in ("max_batch_size", "max_chunk_size"):
        for wrong in (0, -1, 1.5, None, "8", True):
            with pytest.raises(ConfigError, match=f"{name} is {wrong!r}"):
                Generator(**parts, **{name: wrong})
    assert not generator.retired  # a generator that was never made takes nothing over


def test_a_list_is_queued_whole_or_not_at_all(make) -> None:
    generator = make(2)
    with pytest.raises(CacheFullError):
        generator.enqueue([job(prompt(5)), job(prompt(600))])
    assert generator.num_remaining_jobs() == 0
    with pytest.raises(CacheFullError):
        generator.generate(["ab", "c" * 600], 3)
    assert generator.num_remaining_jobs() == 0


def test_generate_fits_exactly_and_not_one_more(make) -> None:
    generator = make(2)
    for length, limit in ((512, 1), (500, 13), (1, 512)):
        said = generator.generate("a" * length, limit, completion_only=True)
        assert said
        for longer in ((length + 1, limit), (length, limit + 1)):
            with pytest.raises(CacheFullError, match="needs 513 places in the cache, which has 51"):
                generator.generate("a" * longer[0], longer[1])


def test_unknown_arguments_are_named_once(make, caplog) -> None:
    generator = make(flash=1)
    job(prompt(3), guidance=2, other=1)
    assert [r.getMessage() for r in caplog.records] == [
        "Generator: unknown arguments are ignored: flash",
        "Job: unknown arguments are ignored: guidance, other",
    ]
    assert generator.num_draft_tokens == 0


def test_probabilities_and_logits(make) -> None:
    generator = make()
    item = job(prompt(30), max_new_tokens=4, return_top_tokens=3, return_probs=True)
    other = job(prompt(31), max_new_tokens=4, return_logits=True)
    events = run(generator, item, other)
    ids = prompt(30)
    for event in [e for e in events[item] if "token_ids" in e]:
        raw = torch.from_numpy(generator.model.reference_logits(ids))
        probs = raw[: generator.num_columns].softmax(-1)
        top = probs.topk(3)
        assert event["top_k_tokens"].tolist() == [[top.indices.tolist()]]
        torch.testing.assert_close(event["top_k_probs"][0, 0], top.values)
        torch.testing.assert_close(event["token_probs"][0, 0], probs[event["token_ids"][0, 0]])
        ids.append(int(event["token_ids"]))
    logits = [e["logits"] for e in events[other] if "logits" in e]
    assert len(logits) == 4 and logits[0].shape == (1, 1, generator.model.width)
    assert torch.isneginf(logits[0][..., generator.num_columns :]).all()
    raw = torch.from_numpy(generator.model.reference_logits(prompt(31)))
    assert torch.equal(logits[0][0, 0, :260], raw[:260])


def test_forced_output(make) -> None:
    generator = make()
    item = job(prompt(30), max_new_tokens=8)
    generator.enqueue(item)
    events = []
    while generator.num_remaining_jobs():
        events += generator.iterate()
        if item.new_tokens == 2 and not item._forced:
            item.constrain_output_now(torch.tensor([[3 + 88, 3 + 89]]))
    mine = tokens(events)
    assert mine[2:4] == [3 + 88, 3 + 89] and len(mine) == 8
    assert mine[4] == int(generator.model.reference_logits(prompt(30) + mine[:4])[:268].argmax())


def test_generate(make) -> None:
    generator = make(12)
    before = job(prompt(20), max_new_tokens=3)
    generator.enqueue(before)
    one = generator.generate("abc", 8, sampler=ArgmaxSampler())
    assert one.startswith("abc")
    assert [e["job"] for e in generator.iterate()][-1] is before
    many = generator.generate(["abc", "fade bad"], 8, sampler=ArgmaxSampler(), completion_only=True)
    assert "abc" + many[0] == one
    pair, last = generator.generate("abc", 8, sampler=ArgmaxSampler(), return_last_results=True)
    assert pair == one and last["eos"]

    class Set:
        def is_set(self) -> bool:
            return True

    assert generator.generate("abc", 8, abort_event=Set()) is None
    assert generator.num_remaining_jobs() == 0


def test_seed_repeats(make) -> None:
    generator = make(12)
    texts = generator.generate(["abc"] * 3, 20, seed=5, completion_only=True)
    again = generator.generate(["abc"], 20, seed=6, completion_only=True)
    assert texts[1] == again[0] and texts[0] != texts[1]


def test_no_growth_over_many_requests(make) -> None:
    model = FakeModel(letters=LETTERS)
    generator = Generator(model, FakeCache(model, 1024), model.tokenizer)
    for i in range(200):
        run(generator, job(prompt(10 + i), max_new_tokens=2), check=False)
    assert generator.pagetable.num_free == 4
    assert len(generator.pagetable.by_key) <= 4
    assert sum(len(g) for g in generator.pagetable.after.values()) <= 4


def test_a_long_prompt_is_warned_about_once(make, caplog) -> None:
    model = FakeModel(letters=LETTERS)
    model.config.max_position_embeddings = 100
    generator = make(model=model)
    for length in (100, 101, 102):
        run(generator, job(prompt(length), max_new_tokens=1))
    assert [r.getMessage() for r in caplog.records if "longer than" in r.getMessage()] == [
        "a prompt of 101 tokens is longer than the 100 that the model was made for"
    ]


def test_strict_mode_refuses_unknown_arguments(monkeypatch) -> None:
    from exl3.generator import options
    from exl3.settings import Settings

    monkeypatch.setattr(options, "settings", lambda: Settings(strict=True))
    with pytest.raises(ConfigError, match="guidance"):
        job(prompt(3), guidance=2)


def test_nobody_starves(make) -> None:
    """Small jobs keep coming; a big one still starts once it has been passed `max_skips` times."""
    generator = make(4)
    generator.enqueue(job(prompt(300), max_new_tokens=30))
    big = job(prompt(1000), max_new_tokens=3)
    generator.enqueue(big)
    passed = 0
    for i in range(200):
        generator.enqueue(job(prompt(20, i), max_new_tokens=12))
        for event in generator.iterate():
            passed += event["stage"] == "started" and event["job"] is not big
        if big.is_finished:
            break
    assert big.is_finished and passed <= 1 + 4 + 4


def test_a_tokenizer_larger_than_the_model(make) -> None:
    model = FakeModel(letters=LETTERS)
    model.config.vocab_size = 200
    generator = make(model=model)
    assert generator.num_columns == 200
    items = [job(prompt(30), sampler=s) for s in (ArgmaxSampler(), DefaultSampler())]
    items.append(job(prompt(30), min_new_tokens=3, stop_conditions=1))
    for events in run(generator, *items).values():
        assert len(tokens(events)) == 10 and max(tokens(events)) < 200


def test_two_caches_two_generators(make) -> None:
    a, b = make(), make()
    first, second = job(prompt(30)), job(prompt(30))
    assert tokens(run(a, first)[first]) == tokens(run(b, second)[second])
    assert not a.retired and not b.retired
