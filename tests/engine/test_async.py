"""AsyncGenerator and AsyncJob."""

from __future__ import annotations

import asyncio

import pytest
import torch

from exl3.errors import CacheFullError
from exl3.generator import AsyncGenerator, AsyncJob
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
