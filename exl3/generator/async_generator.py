"""The generator under asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from torch import Tensor

from ..errors import ConfigError, OutOfMemory
from .event_queue import MAX_UNREAD_BYTES, EventQueue
from .events import Event
from .generator import Generator
from .job import Job

_DRAIN_S = 0.01  # pause between pages that are written while there are no jobs


class _Closed:
    """Put in the queue of a job that ends without an event."""


_CLOSED = _Closed()


class AsyncGenerator:
    """Runs a `Generator` in a background task while there are jobs. Make it in a running loop.

    Without jobs the task sleeps. Delivery never waits for a consumer; what one that has stopped
    reading costs is bounded, see `EventQueue`: a job whose unread tensors exceed that is cancelled,
    and its consumer gets `OutOfMemory` after the events so far.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = Generator(*args, **kwargs)
        self.jobs: dict[Job, AsyncJob] = {}
        self.error: BaseException | None = None
        self._work = asyncio.Event()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def enqueue(self, async_job: AsyncJob) -> None:
        """Put a job in the queue; raises what `Generator.enqueue` raises."""
        if self._closed:
            raise ConfigError("this AsyncGenerator is closed")
        if self.error is not None:
            async_job.queue.put_nowait(self.error)
            return
        self.generator.enqueue(async_job.job)
        self.jobs[async_job.job] = async_job
        self._work.set()

    async def cancel(self, async_job: AsyncJob) -> None:
        """End a job; harmless in any state."""
        self._drop(async_job, _CLOSED)

    def _drop(self, async_job: AsyncJob, last: Any) -> None:
        self.generator.cancel(async_job.job)
        if self.jobs.pop(async_job.job, None) is not None:
            async_job.queue.put_nowait(last)

    async def close(self) -> None:
        """End the task and all jobs, save what the disk tier lacks. Harmless twice, and after
        `model.unload()`."""
        self._closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._give_to_all(_CLOSED)
        self.generator.clear_queue()
        if self.generator.disk_page_cache is None:
            self.generator.close()
        else:  # writing may take seconds
            await asyncio.to_thread(self.generator.close)

    def is_stuck(self, seconds: float) -> bool:
        """See `Generator.is_stuck`; an engine that failed is not stuck, it has `error`."""
        return self.error is None and self.generator.is_stuck(seconds)

    def _give_to_all(self, item: Any) -> None:
        for async_job in self.jobs.values():
            async_job.queue.put_nowait(item)
        self.jobs.clear()

    async def _run(self) -> None:
        try:
            while True:
                if not self.jobs:
                    await self._sleep()
                for event in self.generator.iterate():
                    self._deliver(event)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the engine: every job must hear of it
            self.error = error
            for event in self.generator.take_events():
                self._deliver(event)
            self._give_to_all(error)

    async def _sleep(self) -> None:
        """Until there is a job; pages that the disk tier lacks are written meanwhile."""
        self._work.clear()
        tiers = self.generator.pagetable.tiers
        while tiers.write_behind(1 << 30) and tiers.is_writing():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._work.wait(), _DRAIN_S)
                return
        await self._work.wait()

    def _deliver(self, event: Event) -> None:
        async_job = self.jobs.get(event["job"])
        if async_job is None:
            return
        async_job.queue.put_nowait(event)
        if event["eos"]:
            del self.jobs[event["job"]]
        elif async_job.queue.overflowed:
            reason = f"more than {MAX_UNREAD_BYTES} bytes of results wait unread; read them sooner"
            self._drop(async_job, OutOfMemory(f"job cancelled: {reason}"))


class AsyncJob:
    """A `Job` whose events are iterated over with `async for`."""

    def __init__(self, generator: AsyncGenerator, *args: Any, **kwargs: Any) -> None:
        self.generator = generator
        self.job = Job(*args, **kwargs)
        self.queue = EventQueue()
        self.cancelled = False
        self._ended = False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        # A consumer may have taken items from the queue itself, the last one among them.
        while not self._ended and not (
            self.queue.empty() and (self.cancelled or self.job.is_finished)
        ):
            item = await self.queue.get()
            if not isinstance(item, dict):
                self._ended = True
            if isinstance(item, BaseException):
                raise item
            if self._ended or self.cancelled:
                return
            self._ended = item["eos"]
            yield item

    async def cancel(self) -> None:
        """End the job; harmless in any state."""
        self.cancelled = True
        self.queue.clear()
        await self.generator.cancel(self)

    def constrain_output_now(self, ids: Tensor) -> None:
        """The next tokens are exactly `ids` (1, n); then sampling resumes."""
        self.job.constrain_output_now(ids)
