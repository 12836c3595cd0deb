"""An engine that a server can trust: nobody starves, faults stay where they are, life signs."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref

import pytest

from exl3.errors import ShapeError
from exl3.generator import Generator
from exl3.generator.sampler import ArgmaxSampler, CustomSampler, SS_Base
from tests.engine.test_generator import expect_alone, job, prompt, tokens


def drain(generator: Generator, *jobs, steps: int = 5000) -> dict:
    """Run until nothing is left; events by job."""
    generator.enqueue(list(jobs))
    events = {item: [] for item in jobs}
    for _ in range(steps):
        for event in generator.iterate():
            events.setdefault(event["job"], []).append(event)
        generator.check_integrity()
        if not generator.num_remaining_jobs():
            return events
    raise AssertionError("it does not end")


def ends(events: dict) -> list:
    """Jobs in the order of their serial numbers; each has exactly one final event."""
    assert all(sum(e["eos"] for e in mine) == 1 for mine in events.values())
    return sorted(events, key=lambda item: item.serial_number)


# Pre-emption and requeue


def test_the_youngest_give_way_to_a_job_that_nothing_may_pass(make) -> None:
    generator = make(8)
    old = job(prompt(300), max_new_tokens=30)
    big = job(prompt(1600, 1), max_new_tokens=5, max_skips=2)
    young = [job(prompt(100, i), max_new_tokens=600) for i in (2, 3, 4)]
    generator.enqueue([old, big, *young])
    order, events = [], {item: [] for item in (old, big, *young)}
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            events[event["job"]].append(event)
            order += [event["job"]] * event["eos"]
        generator.check_integrity()
    assert order[:2] == [old, big] and set(order[2:]) == set(young)
    assert generator.metrics["preemptions"] == 2  # the third never started before
    for item, length, start in zip(young, (100,) * 3, (2, 3, 4), strict=True):
        expect_alone(generator, item, events[item], prompt(length, start), 600)
    assert sum("requeue" in e for e in events[young[0]]) == 1
    assert [e["stage"] for e in events[young[0]]].count("started") == 2


def test_no_more_is_taken_than_is_lacking(make) -> None:
    generator = make(8)
    big = job(prompt(1000, 1), max_new_tokens=5, max_skips=2)
    blocker = job(prompt(1280), max_new_tokens=200)
    young = [job(prompt(100, i), max_new_tokens=100) for i in (2, 3)]
    events = drain(generator, blocker, big, *young)
    for item, length, start, limit in (
        (big, 1000, 1, 5),
        (young[0], 100, 2, 100),
        (young[1], 100, 3, 100),
    ):
        expect_alone(generator, item, events[item], prompt(length, start), limit)
    assert generator.metrics["preemptions"] <= 1


def test_a_job_that_requeues_for_ever_does_not_starve_an_older_one(make) -> None:
    generator = make(6)
    first = job(prompt(256), max_new_tokens=100)
    big = job(prompt(1400, 1), max_new_tokens=10, max_skips=1)
    endless = job(prompt(20, 2), max_new_tokens=1400, max_rq_tokens=100)
    order = []
    generator.enqueue([first, big, endless])
    while generator.num_remaining_jobs():
        order += [e["job"] for e in generator.iterate() if e["eos"]]
        generator.check_integrity()
    assert order == [first, big, endless]


def test_jobs_that_requeue_together_keep_their_order(make) -> None:
    generator = make(8)
    jobs = [job(prompt(250, i), max_new_tokens=300, max_rq_tokens=1) for i in range(4)]
    generator.enqueue(jobs)
    for _ in range(3000):
        events = generator.iterate()
        waiting = [item.serial_number for item in generator.pending_jobs]
        assert waiting == sorted(waiting)
        if not generator.num_remaining_jobs():
            break
        generator.check_integrity()
    assert not generator.num_remaining_jobs() and events


@pytest.mark.parametrize("host", [0, 8])
@pytest.mark.parametrize("skips", [0, 1, 4])
def test_everyone_gets_there_under_pressure(make, skips: int, host: int) -> None:
    generator = make(5, max_batch_size=3, cpu_cache_size=host * 2048)
    jobs = []
    for i in range(16):
        length = (40, 300, 700, 1100)[i % 4]
        limit = (100, 170, 40, 90)[(i * 7) % 4]
        step = (None, 64)[i % 2]
        jobs.append(
            job(prompt(length, i), max_new_tokens=limit, max_rq_tokens=step, max_skips=skips)
        )
    events = drain(generator, *jobs)
    for i, item in enumerate(ends(events)):
        length, limit = (40, 300, 700, 1100)[i % 4], (100, 170, 40, 90)[(i * 7) % 4]
        expect_alone(generator, item, events[item], prompt(length, i), limit)
    assert generator.pagetable.num_free == 5


# Failures


def test_a_failed_step_loses_no_event_and_can_be_repeated(make) -> None:
    generator = make(8)
    steady = job(prompt(40), max_new_tokens=20)
    generator.enqueue(steady)
    events = [e for _ in range(3) for e in generator.iterate()]
    empty = job(prompt(1, 1), max_new_tokens=0)
    generator.enqueue(empty)
    generator.model.fail_next = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        generator.iterate()
    generator.check_integrity()
    kept = generator.take_events()
    assert [(e["job"], e["stage"]) for e in kept] == [(empty, "started"), (empty, "streaming")]
    assert kept[-1]["eos"] and not generator.take_events()
    while generator.num_remaining_jobs():
        events += generator.iterate()
    expect_alone(generator, steady, events, prompt(40), 20)


def test_generate_that_fails_leaves_no_jobs_behind(make) -> None:
    generator = make(8)
    other = job(prompt(40, 1), max_new_tokens=30)
    generator.enqueue(other)
    events = generator.iterate()
    original, calls = generator.model.forward, []

    def forward(ids, params=None):
        calls.append(ids)
        if len(calls) == 4:
            raise RuntimeError("device lost")
        return original(ids, params)

    generator.model.forward = forward
    with pytest.raises(RuntimeError, match="device lost"):
        generator.generate(["abc", "def"], max_new_tokens=10)
    generator.check_integrity()
    assert generator.pending_jobs + generator.active_jobs == [other]
    while generator.num_remaining_jobs():
        events += generator.iterate()
    assert {e["job"] for e in events} == {other}
    expect_alone(generator, other, events, prompt(40, 1), 30)


def test_a_prompt_that_the_model_refuses_ends_its_job_only(make) -> None:
    generator = make(8)
    good, bad = job(prompt(40), max_new_tokens=20), job(prompt(600, 1))
    generator.enqueue(good)
    events = [e for _ in range(3) for e in generator.iterate()]
    generator.enqueue(bad)
    original = generator.model.prefill

    def prefill(ids, params=None):
        raise ShapeError("not this one")

    generator.model.prefill = prefill
    last = [e for e in generator.iterate() if e["job"] is bad][-1]
    generator.model.prefill = original
    assert last["eos"] and last["eos_reason"] == "error" and "not this one" in last["error"]
    generator.check_integrity()
    assert generator.metrics["failures"] == 1
    while generator.num_remaining_jobs():
        events += generator.iterate()
    mine = [e for e in events if e["job"] is good]
    assert len(tokens(mine)) >= 18


class Canceller(SS_Base):
    """Cancels jobs at its third token, then draws the argmax."""

    def __init__(self) -> None:
        self.generator, self.victims, self.calls = None, [], 0

    def apply(self, row) -> None:
        self.calls += 1
        if self.calls == 3:
            for victim in self.victims:
                self.generator.cancel(victim)
        row.draw(int(row.logits.argmax()))

    def is_final(self) -> bool:
        return True


@pytest.mark.parametrize("own", [False, True])
def test_a_sampler_may_cancel_jobs(make, own: bool) -> None:
    generator = make(8)
    jobs = [job(prompt(40, i), sampler=CustomSampler([Canceller()])) for i in range(3)]
    step = jobs[1].sampler.steps[0]
    step.generator, step.victims = generator, [jobs[0], jobs[2], *([jobs[1]] * own)]
    events = drain(generator, *jobs)
    assert all(item.is_finished for item in jobs)
    # The first had its third token before, the last did not.
    counts = [sum(e["stage"] == "streaming" for e in events[item]) for item in jobs]
    assert counts == [3, 2 if own else 10, 2]
    assert [any(e["eos"] for e in events[item]) for item in jobs] == [False, not own, False]
    assert generator.pagetable.num_free == 8


# Life signs


def test_heartbeat_tells_idle_from_live_from_stuck(make) -> None:
    generator = make(8)
    time.sleep(0.4)
    assert not generator.is_stuck(0.01)  # idle
    beat = generator.heartbeat()
    assert (beat.steps, beat.active_jobs, beat.pending_jobs, beat.in_step) == (0, 0, 0, False)
    item = job(prompt(30), max_new_tokens=6)
    generator.enqueue(item)
    assert not generator.is_stuck(0.35)  # the time without work does not count
    before = time.monotonic()
    generator.iterate()
    assert before <= generator.last_step_time <= time.monotonic()
    release, inside = threading.Event(), threading.Event()
    original = generator.model.forward

    def hang(ids, params=None):
        inside.set()
        release.wait(10)
        return original(ids, params)

    generator.model.forward = hang
    engine = threading.Thread(target=generator.iterate)
    engine.start()
    assert inside.wait(5)
    assert generator.heartbeat().in_step and not generator.is_stuck(60)
    time.sleep(0.05)
    assert generator.is_stuck(0.04)
    release.set()
    engine.join(5)
    assert not generator.is_stuck(5) and not generator.heartbeat().in_step
    while generator.num_remaining_jobs():
        generator.iterate()
    time.sleep(0.03)
    assert not generator.is_stuck(0.02)


def test_metrics(make) -> None:
    class Broken(SS_Base):
        def apply(self, row) -> None:
            raise RuntimeError("broken step")

        def is_final(self) -> bool:
            return True

    generator = make(8)
    first = job(prompt(600), max_new_tokens=20)
    drain(generator, first)
    again = job(prompt(600), max_new_tokens=20, max_rq_tokens=100)
    broken = job(prompt(30, 1), sampler=CustomSampler([Broken()]))
    gone = job(prompt(30, 2))
    generator.enqueue([again, broken, gone])
    generator.cancel(gone)
    generator.cancel(gone)
    drain(generator)
    found = generator.metrics
    assert found["finished"] == 3 and found["failures"] == 1 and found["cancels"] == 1
    assert found["decode_tokens"] == 41 and found["prefill_tokens"] == 599 + 29
    assert found["prompt_tokens"] == 1230 and found["cached_tokens"] == 599
    assert found["device_hits"] == 2 and found["partial_hits"] == 1
    assert found["host_hits"] == found["disk_hits"] == found["preemptions"] == 0
    assert found["decode_tokens_per_s"] > 0 and found["prefill_tokens_per_s"] > 0
    assert 0 <= found["queue_seconds_p50"] <= found["queue_seconds_p99"] < 10


def test_speeds_fade_when_nothing_happens(make, monkeypatch) -> None:
    generator = make(8)
    drain(generator, job(prompt(300), max_new_tokens=20))
    later = time.monotonic() + 30
    monkeypatch.setattr("exl3.generator.metrics.time.monotonic", lambda: later)
    assert generator.metrics["decode_tokens_per_s"] == 0


def test_counting_is_cheap(make) -> None:
    from exl3.generator.metrics import Metrics

    metrics = Metrics()
    generator = make(8)
    item = job(prompt(30), sampler=ArgmaxSampler(), max_new_tokens=40)
    events = [e for e in drain(generator, item)[item] if e["stage"] == "streaming" and not e["eos"]]
    start = time.process_time()
    for _ in range(2000):
        metrics.observe(events[:1], 0)
    assert (time.process_time() - start) / 2000 < 50e-6


def test_finished_jobs_hold_no_memory(make, tmp_path) -> None:
    """A thousand requests, and nothing of them is left but what the tiers may keep."""
    generator = make(6, cpu_cache_size=6 * 2048, disk_cache_dir=tmp_path, disk_cache_size=60_000)
    gone = []

    def batch(count: int) -> None:
        jobs = []
        for i in range(count):
            length = (10, 300, 700)[i % 3] if i % 10 == 0 else 10
            jobs.append(job(prompt(length, i), max_new_tokens=2, max_skips=i % 2))
        gone.extend(weakref.ref(item) for item in jobs)
        generator.enqueue(jobs)
        for item in jobs[::7]:
            generator.cancel(item)
        while generator.num_remaining_jobs():
            generator.iterate()

    batch(100)
    generator.pagetable.tiers.flush(5)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(9):
        batch(100)
    generator.pagetable.tiers.flush(5)
    del generator.model.forwards[:]
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sum(ref() is not None for ref in gone) == 0
    assert after - before < 200_000
    assert len(generator.pagetable.by_key) <= 6 and len(generator.pagetable.after) <= 6
    assert len(generator.cpu_page_cache) <= 6 and len(list(tmp_path.rglob("*.page"))) <= 14
    generator.close()
