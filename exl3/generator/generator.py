"""The generator: runs many jobs on one model, step by step."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Exl3Error
from ..sampling import NothingToSampleError
from .batch import Runner
from .drafting import draft_options, speculation
from .drawing import draw_one, draw_together
from .events import Event, draft_figures
from .filter import Filter
from .filter.base import FilterError
from .job import Job, JobState
from .metrics import Metrics, Pulse, Watched
from .options import note_unknown
from .pages import Page
from .reports import Rows
from .scheduler import Scheduler
from .setup import (
    PromptCheck,
    check_kinds,
    check_model,
    check_sizes,
    checkpoint_interval,
    make_table,
    num_columns,
    take_over,
)
from .simple import Prompts, run_prompts
from .stream import Outcome
from .tiers import TierSizes, make_tiers

logger = logging.getLogger(__name__)


class Generator(Watched):
    """Continuous batching over a paged cache.

    `iterate` does one step: starts jobs, ingests prompts, `max_chunk_size` tokens of all new ones
    together, and draws one token for all others, or several where a draft was right.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokenizer: Any,
        max_batch_size: int = 256,
        max_chunk_size: int = 2048,
        max_q_size: int = 8,
        draft_model: Any = None,
        draft_cache: Any = None,
        num_draft_tokens: int | None = None,
        show_visualizer: bool = False,
        enable_defrag: bool = True,
        cpu_cache_size: int = 0,
        recurrent_cache_size: int = 4 * 1024**3,
        recurrent_checkpoint_interval: int | None = None,
        recurrent_checkpoint_interval_pp: int = 32768,
        ngram_match_min: int = 0,
        dynamic_draft_tokens: bool = False,
        dynamic_draft_alpha_up: float = 1.30,
        dynamic_draft_alpha_down: float = 0.65,
        dynamic_draft_skip_ema: float = 0.3,
        dynamic_draft_probe_interval: int = 16,
        record_draft_stats: bool = False,
        disk_cache_dir: str | Path | None = None,
        disk_cache_size: int = 16 * 1024**3,
        **kwargs: Any,
    ) -> None:
        note_unknown("Generator", kwargs)
        check_kinds(model, cache, tokenizer, draft_model, draft_cache)
        check_model(model, cache, show_visualizer)
        check_sizes(max_batch_size=max_batch_size, max_chunk_size=max_chunk_size)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_batch_size, self.max_chunk_size = max_batch_size, max_chunk_size
        self.max_total_tokens = cache.max_num_tokens
        self.num_columns = num_columns(model, tokenizer)
        self.padded_vocab_size = (tokenizer.actual_vocab_size + 31) // 32 * 32
        drafts = draft_options(
            draft_model,
            num_draft_tokens,
            *(dynamic_draft_tokens, dynamic_draft_alpha_up, dynamic_draft_alpha_down),
            *(dynamic_draft_skip_ema, dynamic_draft_probe_interval, record_draft_stats),
        )
        self._speculation = speculation(self, draft_model, draft_cache, ngram_match_min, drafts)
        self.num_draft_tokens = self._speculation.options.tokens if self._speculation else 0
        self.recurrent_cache = None
        interval = checkpoint_interval(model, recurrent_checkpoint_interval)
        self.recurrent_checkpoint_interval = interval
        self.retired = False  # another generator has taken over the cache
        self.closed = False
        self._metrics, self._pulse = Metrics(), Pulse()
        sizes = TierSizes(cpu_cache_size, disk_cache_dir, disk_cache_size)
        drafters = [] if draft_cache is None else [(draft_model, draft_cache)]
        self._take_pages([(model, cache), *drafters], sizes)
        self._scheduler = Scheduler(max_batch_size)
        self._runner = Runner(model, cache, self.pagetable, max_chunk_size)
        self._check_prompt = PromptCheck(model, tokenizer)
        self._next_serial = 0
        self._turns = count()  # of jobs whose prompts are ingested
        self._kept: list[Event] = []  # for the next call of `iterate`

    def _take_pages(self, pairs: list[tuple[Any, Any]], sizes: TierSizes) -> None:
        """Own the pages of models and their caches."""
        models, caches = [model for model, _ in pairs], [cache for _, cache in pairs]
        tiers = make_tiers(models, caches, sizes)
        self.cpu_page_cache, self.disk_page_cache = tiers.host, tiers.disk
        self.pagetable = make_table(caches, tiers)
        for cache in caches:
            take_over(cache, self)

    # Jobs

    @property
    def pending_jobs(self) -> list[Job]:
        return list(self._scheduler.pending)

    @property
    def active_jobs(self) -> list[Job]:
        return list(self._scheduler.active)

    def num_remaining_jobs(self) -> int:
        return self.num_pending_jobs() + self.num_active_jobs()

    def num_active_jobs(self) -> int:
        return len(self._scheduler.active)

    def num_pending_jobs(self) -> int:
        return len(self._scheduler.pending)

    def enqueue(self, job: Job | list[Job]) -> int | list[int]:
        """Put a job, or several, at the end of the queue; returns serial numbers. If one of several
        is refused, none of them is queued.

        Raises:
            CacheFullError: it can never fit the cache.
            ConfigError: ids outside the vocabulary; a job or filter in use; a bad stop condition.
        """
        if not isinstance(job, list | tuple):
            return self._enqueue(job)
        serials: list[int] = []
        try:
            for item in job:
                serials.append(self._enqueue(item))
        except Exception:
            for item in job[: len(serials)]:
                self.cancel(item)
            raise
        return serials

    def _enqueue(self, job: Job) -> int:
        self._check_owner()
        if not isinstance(job, Job):
            raise ConfigError(
                f"enqueue: got {job!r:.60}, expected a Job or a list of them; for text use"
                " generate(prompt)"
            )
        self._check_prompt(job)
        job.prepare(self, self._next_serial)
        if self._speculation is not None:
            self._speculation.admit(job)
        self._next_serial += 1
        if not self.num_remaining_jobs():
            self._pulse.woken()
        self._scheduler.pending.append(job)
        return job.serial_number

    def cancel(self, job: Job) -> None:
        """Remove a job, without an event. Nothing happens if it is unknown or finished."""
        if not isinstance(job, Job):
            raise ConfigError(f"cancel: got {job!r:.60}, expected a Job")
        if job.generator is not self or not job.is_running():
            return
        self._scheduler.remove(job)
        job.drop()
        self._release(job)
        self._metrics.counts["cancels"] += 1

    def clear_queue(self) -> None:
        """Cancel all jobs."""
        for job in self.pending_jobs + self.active_jobs:
            self.cancel(job)

    def _check_owner(self) -> None:
        if self.closed:
            raise ConfigError("this Generator is closed; make a new one")
        if self.retired:
            raise ConfigError("a newer Generator uses this cache; this one can only cancel jobs")

    def retire(self) -> None:
        """Another generator has taken over the cache; this one can only cancel jobs."""
        self.retired = True
        self._drop_tiers()

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel all jobs, write what the disk tier lacks within `timeout_s` seconds, give the
        memory of the tiers back. Harmless twice, and after `model.unload()`."""
        self.clear_queue()
        self.closed = True
        self._drop_tiers(timeout_s)

    def _drop_tiers(self, timeout_s: float = 0.0) -> None:
        self.pagetable.tiers.close(timeout_s)
        self.cpu_page_cache = self.disk_page_cache = None

    def _release(self, job: Job) -> None:
        for sequence in job.sequences:
            sequence.release(self.pagetable)
        if job.is_finished:
            job.draft_state = None
        self._runner.forget(job)

    # Steps

    def iterate(self) -> list[Event]:
        """One step; events in the order in which things happened.

        If it raises, the engine is as it was before the part that failed, and the events so far
        are returned by the next call or by `take_events`.
        """
        self._check_owner()
        events = self.take_events()
        self._pulse.begin()
        before = self._runner.prefill_tokens
        try:
            self._step(events)
        except BaseException:
            self._kept = events
            raise
        finally:
            self._pulse.end(progress=bool(events))
        self._metrics.observe(events, self._runner.prefill_tokens - before)
        return events

    def take_events(self) -> list[Event]:
        """Events that no call of `iterate` has returned, because it failed."""
        events, self._kept = self._kept, []
        return events

    def keep_events(self, events: list[Event]) -> None:
        """Let the next call of `iterate` begin with these."""
        self._kept = events

    def _step(self, events: list[Event]) -> None:
        for job in self._scheduler.start(self._try_start):
            events.append(job.started())
        for job in self.active_jobs:
            if job.state is JobState.DECODE and job.options.max_new_tokens == 0:
                self._end(job, job.end_early("max_new_tokens"), events)
        self._ingest(events)
        self._decode(events)
        self._preempt(events)
        tiers = self.pagetable.tiers
        tiers.write_behind(1 if self.num_active_jobs() else 1 << 30)
        if not events and self.num_active_jobs():  # all wait for pages from files
            tiers.wait(0.02)

    def _preempt(self, events: list[Event]) -> None:
        """Give a job that nothing may pass any more the pages of the youngest that passed it."""
        blocked, passed = self._scheduler.preemptable()
        if blocked is None:
            return
        missing = blocked.missing_pages(self.pagetable)
        victims: list[Job] = []
        held: Counter[Page] = Counter()  # by the victims
        for job in passed:
            if missing > 0:
                victims.append(job)
                for page in job.pages():
                    held[page] += 1
                    missing -= page.holders == held[page]
        if missing > 0:
            return
        for job in victims:
            told = [e for e in events if e["job"] is job and e["stage"] == "streaming"]
            self._requeue(job, told[-1] if told else {})
            self._metrics.counts["preemptions"] += 1

    def _requeue(self, job: Job, event: Event) -> None:
        self._release(job)
        self._scheduler.requeue(job)
        job.requeue(event)

    def _try_start(self, job: Job) -> bool:
        first, waited = job.first_round, job.timing.running()
        started = job.try_start(self.pagetable)
        if started and first:
            self._metrics.waited(waited)
        if started:
            job.turn = next(self._turns)
            if self._speculation is not None:
                self._speculation.drafter.start(job)
        return started

    def _ingest(self, events: list[Event]) -> None:
        """Ingest prompts, those first whose turn is the longest ago: one chunk in all, so that the
        others get their next token soon."""
        runner = self._runner
        runner.room = runner.chunk
        jobs = [job for job in self._scheduler.active if job.state is JobState.PREFILL]
        for job in sorted(jobs, key=lambda job: job.turn):
            before = runner.room
            if not before:
                return
            self._prefill(job, events)
            if runner.room < before:
                job.turn = next(self._turns)

    def _prefill(self, job: Job, events: list[Event]) -> None:
        job.timing.to("prefill")
        try:
            if self._runner.prefill(job):
                events.append(job.progress())
        except Exl3Error as error:  # refused before it ran: the fault of this job's prompt
            self._end(job, _failed(job, error), events)
            return
        if self._speculation is not None:
            self._speculation.drafter.follow(job)
        if job.is_prefill_done():
            job.state = JobState.DECODE
            if job.options.max_new_tokens == 0:
                self._end(job, job.end_early("max_new_tokens"), events)

    def _decode(self, events: list[Event]) -> None:
        jobs = [job for job in self._scheduler.active if job.state is JobState.DECODE]
        jobs = self._runner.ready(jobs)
        if not jobs:
            return
        for job in jobs:
            job.timing.to("generate")
        drafts: list[list[int]] = [[] for _ in jobs]
        if self._speculation is not None:
            drafts = self._speculation.propose(jobs)
        for job in jobs:
            job.masks_ahead.start()  # while the model runs
        logits = Rows(self._runner.decode(jobs, drafts), self.num_columns)
        tokens = draw_together(jobs, drafts, logits)
        self._run_ahead(jobs, tokens)
        row = 0
        for job, draft in zip(jobs, drafts, strict=True):
            place, row = row, row + 1 + len(draft)
            if job.is_finished:  # the sampler or filter of another has cancelled it
                continue
            last = self._take(job, draft, logits, place, tokens, events)
            if job.is_finished:
                if last["eos"]:
                    self._end(job, last, events)
                continue  # else its own sampler or filter has cancelled it
            events.append(last)
            if job.must_requeue():
                self._requeue(job, last)

    def _run_ahead(self, jobs: list[Job], tokens: list[int | None]) -> None:
        """Let a device begin the next step while the host looks at the tokens of this one. A job
        that ends by its text, or takes tokens back, has been run in vain."""
        runner = self._runner
        if self._speculation is not None or not (runner.is_asynchronous and runner.runs_ahead):
            return
        if any(job.options.wants_logits for job in jobs):  # copies of them would wait for the step
            return
        drawn = {job: token for job, token in zip(jobs, tokens, strict=True) if token is not None}
        if len(drawn) < len(jobs):  # so would those that the host draws from
            return
        this = set(jobs)
        following = [
            job
            for job in self._scheduler.active
            if job.state is JobState.DECODE
            and (job.goes_on(drawn[job]) if job in drawn else job not in this)
        ]
        if following:
            runner.run_ahead(following, drawn)

    def _take(
        self,
        job: Job,
        draft: list[int],
        logits: Rows,
        row: int,
        tokens: list[int | None],
        events: list[Event],
    ) -> Event:
        """Draw tokens from a job's rows for as long as they are those drafted. All events but the
        last are added; that is returned."""
        position, accepted = len(job.sequence), 0
        while True:
            place = row + accepted
            try:
                token = tokens[place]
                drawn = draw_one(job, logits, place) if token is None else token
                event = job.accept(drawn, logits, place)
            except Exception as error:  # a fault of one job must not end the others
                event = _failed(job, error)
                break
            if accepted == len(draft) or drawn != draft[accepted]:
                break
            accepted += 1
            if job.is_finished or len(job.sequence) != position + accepted:
                break  # or a banned string took tokens back
            job.store(self.pagetable)
            events.append(event)
        if self._speculation is not None:
            self._speculation.settle(job, position, len(draft), accepted)
            if job.is_finished:  # made before this draft was counted
                event.update(draft_figures(job))
        return event

    def _end(self, job: Job, event: Event, events: list[Event]) -> None:
        self._scheduler.remove(job)
        self._release(job)
        events.append(event)

    def check_integrity(self) -> None:
        """Check the page table against the running jobs. Raises Exl3Error."""
        self.pagetable.check_integrity([job.pages() for job in self._scheduler.active])

    # All at once

    def generate(
        self,
        prompt: str | list[str],
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        seed: int | None = None,
        sampler: Any = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Any = None,
        add_bos: bool = False,
        abort_event: Any = None,
        completion_only: bool = False,
        filters: list[Filter] | list[list[Filter] | None] | None = None,
        return_last_results: bool = False,
        embeddings: Any = None,
        max_rq_tokens: int | None = None,
        stop_on_loop: tuple[int, int] | None = None,
        loras: Any = None,
        negative_prompt: str | list[str] | None = None,
        cfg_scale: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Complete one prompt or several.

        Returns:
            str for a str, list for a list: prompt and completion, or only the completion. With
            `return_last_results` a pair with the final event(s). None if aborted.
        """
        note_unknown("generate", kwargs)
        prompts = Prompts(
            *(prompt, negative_prompt, sampler, filters, embeddings, seed),
            *(add_bos, encode_special_tokens),
        )
        jobs = prompts.jobs(
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            token_healing=token_healing,
            decode_special_tokens=decode_special_tokens,
            stop_conditions=stop_conditions,
            max_rq_tokens=max_rq_tokens,
            stop_on_loop=stop_on_loop,
            loras=loras,
            cfg_scale=cfg_scale,
        )
        last = run_prompts(self, jobs, abort_event)
        if last is None:
            return None
        return prompts.results(last, completion_only, return_last_results)


def _failed(job: Job, error: Exception) -> Event:
    """The final event of a job whose filter or sampler failed."""
    logger.warning("job %d ends: %s: %s", job.serial_number, type(error).__name__, error)
    logger.debug("where it failed", exc_info=error)
    if job.is_finished:
        return job.end(Outcome(reason="error"), error=str(error), exception=error)
    if isinstance(error, FilterError | NothingToSampleError):
        return job.end_early("end_filter", filter_error=str(error), exception=error)
    return job.end_early("error", error=str(error), exception=error)
