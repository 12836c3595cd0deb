"""The generator under asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from .events import Event
from .generator import Generator
from .job import Job


class _Closed:
    """Put in the queue of a job that ends without an event."""


_CLOSED = _Closed()


class AsyncGenerator:
    """Runs a `Generator` in a background task while there are jobs. Make it in a running loop."""

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
        self.generator.cancel(async_job.job)
        if self.jobs.pop(async_job.job, None) is not None:
            async_job.queue.put_nowait(_CLOSED)

    async def close(self) -> None:
        """End the task and all jobs."""
        self._closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.generator.clear_queue()
        self._give_to_all(_CLOSED)

    def _give_to_all(self, item: Any) -> None:
        for async_job in self.jobs.values():
            async_job.queue.put_nowait(item)
        self.jobs.clear()

    async def _run(self) -> None:
        try:
            while True:
                if not self.jobs:
                    self._work.clear()
                    await self._work.wait()
                for event in self.generator.iterate():
                    self._deliver(event)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the engine: every job must hear of it
            self.error = error
            self._give_to_all(error)

    def _deliver(self, event: Event) -> None:
        async_job = self.jobs.get(event["job"])
        if async_job is None:
            return
        async_job.queue.put_nowait(event)
        if event["eos"]:
            del self.jobs[event["job"]]


class AsyncJob:
    """A `Job` whose events are iterated over with `async for`."""

    def __init__(self, generator: AsyncGenerator, *args: Any, **kwargs: Any) -> None:
        self.generator = generator
        self.job = Job(*args, **kwargs)
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        # A consumer may have taken items from the queue itself, the last one among them.
        while not (self.queue.empty() and (self.cancelled or self.job.is_finished)):
            item = await self.queue.get()
            if isinstance(item, BaseException):
                raise item
            if not isinstance(item, dict) or self.cancelled:
                return
            yield item
            if item["eos"]:
                return

    async def cancel(self) -> None:
        """End the job; harmless in any state."""
        self.cancelled = True
        await self.generator.cancel(self)

    def constrain_output_now(self, ids: Tensor) -> None:
        """The next tokens are exactly `ids` (1, n); then sampling resumes."""
        self.job.constrain_output_now(ids)
