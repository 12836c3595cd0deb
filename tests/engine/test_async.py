"""AsyncGenerator and AsyncJob."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import torch

from exl3.errors import CacheFullError, ConfigError, OutOfMemory
from exl3.generator import AsyncGenerator, AsyncJob
from exl3.generator.event_queue import MAX_UNREAD
from exl3.generator.sampler import ArgmaxSampler
from tests.engine.fake import FakeCache, FakeModel
from tests.engine.reference import run_alone
from tests.engine.test_generator import prompt, text, tokens


def run(body) -> None:
    """Run `body(generator)` in a loop, then close."""

    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        generator = AsyncGenerator(
            model=model,
            cache=FakeCache(model, 2048),
            tokenizer=model.tokenizer,
            draft_model=None,
            draft_cache=None,
            num_draft_tokens=None,
        )
        await asyncio.wait_for(body(generator), 20)
        await asyncio.wait_for(generator.close(), 5)
        generator.generator.check_integrity()
        assert generator.generator.pagetable.num_free == 8 and not generator.jobs

    asyncio.run(main())


def start(generator: AsyncGenerator, length: int = 20, **kwargs) -> AsyncJob:
    kwargs.setdefault("max_new_tokens", 12)
    return AsyncJob(
        generator, input_ids=[torch.tensor([prompt(length)])], sampler=ArgmaxSampler(), **kwargs
    )


async def collect(job: AsyncJob) -> list[dict]:
    return [event async for event in job]


def test_many_jobs_at_once() -> None:
    async def body(generator: AsyncGenerator) -> None:
        model = generator.generator.model
        jobs = [start(generator, 20 + 100 * i) for i in range(4)]
        for i, events in enumerate(await asyncio.gather(*map(collect, jobs))):
            want = run_alone(model, prompt(20 + 100 * i), 12, sampler=ArgmaxSampler())
            assert (tokens(events), text(events), events[-1]["eos_reason"]) == want
        # Asleep now; a new job wakes it.
        await asyncio.sleep(0.02)
        assert (await collect(start(generator)))[-1]["eos"]

    run(body)


def test_cancel_in_every_state() -> None:
    async def body(generator: AsyncGenerator) -> None:
        queued, running, ended = start(generator), start(generator, max_new_tokens=500), None
        await queued.cancel()
        assert queued.cancelled and await collect(queued) == []
        async for event in running:
            if event["stage"] == "streaming":
                await running.cancel()
                break
        await running.cancel()
        ended = start(generator)
        events = await collect(ended)
        await ended.cancel()
        assert events[-1]["eos"] and not generator.jobs
        waiting = start(generator, max_new_tokens=900)
        task = asyncio.create_task(collect(waiting))
        await asyncio.sleep(0)
        await waiting.cancel()
        await asyncio.wait_for(task, 2)

    run(body)


def test_a_consumer_that_stops_reading_blocks_nobody() -> None:
    async def body(generator: AsyncGenerator) -> None:
        lazy, keen = start(generator, max_new_tokens=50), start(generator, 33)
        assert (await collect(keen))[-1]["eos"]
        while not lazy.job.is_finished:
            await asyncio.sleep(0.001)
        assert lazy.queue.qsize() >= 50 and isinstance(lazy.queue.get_nowait(), dict)

    run(body)


def test_a_job_that_cannot_be_enqueued_is_not_registered() -> None:
    async def body(generator: AsyncGenerator) -> None:
        with pytest.raises(CacheFullError, match="cannot be enqueued"):
            start(generator, 3000)
        assert not generator.jobs
        assert (await collect(start(generator)))[-1]["eos"]

    run(body)


def test_an_engine_failure_reaches_all_jobs_and_later_ones() -> None:
    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        cache = FakeCache(model, 2048)
        first = AsyncGenerator(model, cache, model.tokenizer)
        jobs = [start(first, max_new_tokens=500) for _ in range(2)]
        await jobs[1].queue.get()
        model.fail_next = RuntimeError("device lost")
        for job in jobs:
            with pytest.raises(RuntimeError, match="device lost"):
                await collect(job)
        assert isinstance(first.error, RuntimeError)
        with pytest.raises(RuntimeError, match="device lost"):
            await collect(start(first))
        # The server builds a new one on the same cache without closing the old one.
        second = AsyncGenerator(model, cache, model.tokenizer)
        assert (await collect(start(second)))[-1]["eos"]
        for job in jobs:
            await job.cancel()
        await first.close()
        await second.close()

    asyncio.run(main())


def test_close_ends_waiting_consumers() -> None:
    async def body(generator: AsyncGenerator) -> None:
        task = asyncio.create_task(collect(start(generator, max_new_tokens=900)))
        await asyncio.sleep(0.01)
        await generator.close()
        await asyncio.wait_for(task, 2)

    run(body)


def test_forced_output() -> None:
    async def body(generator: AsyncGenerator) -> None:
        job = start(generator)
        job.constrain_output_now(torch.tensor([[100, 101]]))
        assert tokens(await collect(job))[:2] == [100, 101]

    run(body)


def test_an_abandoned_queue_stays_small_and_loses_nothing() -> None:
    async def body(generator: AsyncGenerator) -> None:
        lazy = start(generator, max_new_tokens=1700, return_probs=True, return_top_tokens=2)
        while not lazy.job.is_finished:
            await asyncio.sleep(0.001)
        assert lazy.queue.qsize() <= MAX_UNREAD + 8
        events = await collect(lazy)
        want = run_alone(generator.generator.model, prompt(20), 1700, sampler=ArgmaxSampler())
        assert (tokens(events), text(events), events[-1]["eos_reason"]) == want
        shapes = [tuple(e["top_k_probs"].shape[1:]) for e in events if "top_k_probs" in e]
        assert sum(n for n, _ in shapes) == 1700 and {k for _, k in shapes} == {2}
        assert sum(e["token_probs"].numel() for e in events if "token_probs" in e) == 1700
        assert lazy.queue.unread_bytes == 0

    run(body)


def test_unread_logits_do_not_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr("exl3.generator.event_queue.MAX_UNREAD_BYTES", 40 * 4 * 384)

    async def body(generator: AsyncGenerator) -> None:
        lazy = start(generator, max_new_tokens=900, return_logits=True)
        other = start(generator, 33, max_new_tokens=100)
        assert (await collect(other))[-1]["eos"] and lazy.job.is_finished
        assert lazy.job not in generator.jobs and lazy.job.new_tokens < 60
        events = []
        with pytest.raises(OutOfMemory, match="unread"):
            async for event in lazy:
                events.append(event)
        assert len(tokens(events)) >= 40
        assert await collect(lazy) == []  # over; asking again does not hang
        await lazy.cancel()

    run(body)


def test_cancel_drops_what_was_not_read() -> None:
    async def body(generator: AsyncGenerator) -> None:
        job = start(generator, max_new_tokens=30)
        while not job.job.is_finished:
            await asyncio.sleep(0.001)
        await job.cancel()
        assert job.queue.empty() and await collect(job) == []
        running = start(generator, max_new_tokens=900)
        while running.queue.qsize() < 20:
            await asyncio.sleep(0.001)
        await running.cancel()
        await running.cancel()
        assert await collect(running) == [] and running.queue.unread_bytes == 0

    run(body)


def test_close_while_everything_is_going_on(tmp_path) -> None:
    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        generator = AsyncGenerator(
            model,
            FakeCache(model, 2048),
            model.tokenizer,
            max_batch_size=3,
            cpu_cache_size=1 << 14,
            disk_cache_dir=tmp_path,
        )
        jobs = [start(generator, 300 + i, max_new_tokens=400) for i in range(6)]
        tasks = [asyncio.create_task(collect(job)) for job in jobs]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(generator.close(), 5)
        await asyncio.wait_for(generator.close(), 5)
        for events in await asyncio.wait_for(asyncio.gather(*tasks), 2):
            assert not any(e["eos"] for e in events)
        for job in jobs:
            await job.cancel()
        assert generator.generator.pagetable.num_free == 8
        with pytest.raises(ConfigError, match="closed"):
            start(generator)

    asyncio.run(main())


def test_an_engine_failure_comes_after_the_events_before_it() -> None:
    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        generator = AsyncGenerator(model, FakeCache(model, 2048), model.tokenizer)
        running = start(generator, max_new_tokens=500)
        await running.queue.get()
        done = start(generator, 1, max_new_tokens=0)
        model.fail_next = RuntimeError("device lost")
        assert (await collect(done))[-1]["eos_reason"] == "max_new_tokens"
        with pytest.raises(RuntimeError, match="device lost"):
            await collect(running)
        assert not generator.is_stuck(0)  # it has failed; that is another thing
        await generator.close()

    asyncio.run(main())


def test_idle_takes_no_time(tmp_path) -> None:
    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        generator = AsyncGenerator(
            model,
            FakeCache(model, 4096),
            model.tokenizer,
            cpu_cache_size=1 << 14,
            disk_cache_dir=tmp_path,
        )
        await collect(start(generator, 3000))
        for _ in range(1000):  # pages are written meanwhile
            if len(generator.generator.disk_page_cache) == 11:
                break
            await asyncio.sleep(0.01)
        assert len(generator.generator.disk_page_cache) == 11
        await asyncio.sleep(0.05)
        used, steps = time.process_time(), generator.generator.heartbeat().steps
        await asyncio.sleep(0.7)
        assert time.process_time() - used < 0.007
        assert generator.generator.heartbeat().steps == steps and not generator.is_stuck(0.1)
        await generator.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_random_consumers(seed: int, tmp_path) -> None:
    rng = random.Random(seed)

    async def client(generator: AsyncGenerator) -> None:
        for _ in range(4):
            length, limit = rng.choice((5, 256, 300, 700)), rng.choice((1, 30, 200))
            job = start(
                generator, length, max_new_tokens=limit, max_rq_tokens=rng.choice((None, 8))
            )
            kind = rng.choice(("read", "read", "cancel", "leave", "late"))
            if kind == "late":
                await asyncio.sleep(0.02)
            leave, events = rng.randrange(40), []
            if kind == "cancel":
                await asyncio.sleep(rng.choice((0, 0.005)))
                await job.cancel()
            async for event in job:
                events.append(event)
                if kind == "leave" and len(events) > leave:
                    await job.cancel()
            want = run_alone(
                generator.generator.model, prompt(length), limit, sampler=ArgmaxSampler()
            )
            said = tokens(events)
            assert said == want[0][: len(said)]
            assert kind in ("cancel", "leave") or said == want[0]

    async def main() -> None:
        model = FakeModel(letters=b"abcdef \n")
        generator = AsyncGenerator(
            model,
            FakeCache(model, 6 * 256),
            model.tokenizer,
            max_batch_size=4,
            cpu_cache_size=1 << 13,
            disk_cache_dir=tmp_path,
        )
        clients = (client(generator) for _ in range(8))
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        generator.generator.check_integrity()
        assert generator.generator.pagetable.num_free == 6 and not generator.jobs
        await generator.close()

    asyncio.run(main())
