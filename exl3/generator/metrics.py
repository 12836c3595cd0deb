"""What a generator has done, and whether it still does something."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .events import Event

if TYPE_CHECKING:
    from .pages import PageTable

WINDOW_S = 10  # over which speeds are averaged
_WAITS = 1024  # jobs whose time in the queue is remembered


class Metrics:
    """Counters, cheap enough for every step."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._start = time.monotonic()
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._buckets: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # second, prefill, decode

    def waited(self, seconds: float) -> None:
        """A job left the queue for the first time."""
        self._waits.append(seconds)

    def observe(self, events: list[Event], prefill_tokens: int) -> None:
        """Take in the events of a step and the number of prompt tokens that it computed."""
        decoded = 0
        for event in events:
            if event["stage"] != "streaming":
                continue
            decoded += 1
            if "requeue" in event:
                self.counts["requeues"] += 1
            if event["eos"]:
                self._ended(event)
        counts = self.counts
        counts["prefill_tokens"] += prefill_tokens
        counts["decode_tokens"] += decoded
        second = int(time.monotonic())
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append([second, 0, 0])
        self._buckets[-1][1] += prefill_tokens
        self._buckets[-1][2] += decoded

    def _ended(self, event: Event) -> None:
        self.counts["finished"] += 1
        self.counts["failures"] += "exception" in event
        self.counts["prompt_tokens"] += event["prompt_tokens"]
        self.counts["cached_tokens"] += event["cached_tokens"]
        for name in ("accepted_draft_tokens", "rejected_draft_tokens"):
            self.counts[name] += event.get(name, 0)

    def snapshot(self) -> dict[str, Any]:
        """See `Generator.metrics`."""
        now = time.monotonic()
        span = max(1.0, min(WINDOW_S, now - self._start))
        recent = [bucket for bucket in self._buckets if bucket[0] > now - 1 - span]
        names = (
            *("finished", "cancels", "failures", "requeues", "preemptions"),
            *("prompt_tokens", "cached_tokens", "prefill_tokens", "decode_tokens"),
            *("accepted_draft_tokens", "rejected_draft_tokens"),
        )
        out: dict[str, Any] = {name: self.counts[name] for name in names}
        out["prefill_tokens_per_s"] = sum(bucket[1] for bucket in recent) / span
        out["decode_tokens_per_s"] = sum(bucket[2] for bucket in recent) / span
        waits = sorted(self._waits)
        for share in (50, 90, 99):
            place = min(len(waits) - 1, len(waits) * share // 100)
            out[f"queue_seconds_p{share}"] = waits[place] if waits else 0.0
        return out


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The state of an engine at one moment.

    `seconds_since_step`: since a step ended; `seconds_since_progress`: since a step did something
    for a job, or the engine was idle. `in_step`: a step is running now.
    """

    steps: int
    active_jobs: int
    pending_jobs: int
    in_step: bool
    seconds_since_step: float
    seconds_since_progress: float


class Pulse:
    """Times of steps, `time.monotonic` seconds. Any thread may read them."""

    def __init__(self) -> None:
        self.steps = 0
        self.in_step = False
        self.last_step = self.last_progress = time.monotonic()

    def begin(self) -> None:
        self.in_step = True

    def end(self, *, progress: bool) -> None:
        self.in_step = False
        self.steps += 1
        self.last_step = time.monotonic()
        if progress:
            self.last_progress = self.last_step

    def woken(self) -> None:
        """A job came to an idle engine."""
        self.last_progress = time.monotonic()


class Watched(ABC):
    """An engine that can be asked how it is."""

    pagetable: PageTable
    _metrics: Metrics
    _pulse: Pulse

    @abstractmethod
    def num_active_jobs(self) -> int: ...

    @abstractmethod
    def num_pending_jobs(self) -> int: ...

    @property
    def metrics(self) -> dict[str, Any]:
        """Counts since the start (`finished cancels failures requeues preemptions`, tokens
        `prompt_tokens cached_tokens` of finished jobs, `prefill_tokens decode_tokens` computed),
        `prefill_tokens_per_s decode_tokens_per_s` over the last ten seconds,
        `queue_seconds_p50 p90 p99` of the last 1024 jobs, and pages of prompts found in each tier:
        `device_hits host_hits disk_hits`, or in part: `partial_hits`."""
        table = self.pagetable
        return {
            **self._metrics.snapshot(),
            "device_hits": table.metrics["reused_pages"],
            "partial_hits": table.metrics["copied_pages"],
            **table.tiers.metrics,
        }

    @property
    def last_step_time(self) -> float:
        """When the last step ended, in `time.monotonic` seconds."""
        return self._pulse.last_step

    def heartbeat(self) -> Heartbeat:
        """The state of the engine now. Any thread may ask, also while a step runs."""
        now, pulse = time.monotonic(), self._pulse
        active, pending = self.num_active_jobs(), self.num_pending_jobs()
        return Heartbeat(
            pulse.steps,
            active,
            pending,
            pulse.in_step,
            now - pulse.last_step,
            now - pulse.last_progress if active or pending else 0.0,
        )

    def is_stuck(self, seconds: float) -> bool:
        """Whether there are jobs and nothing was done for any of them for so long. Choose it
        longer than the longest step. Any thread may ask."""
        return self.heartbeat().seconds_since_progress > seconds
