"""One request: its tokens, its limits, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..model.adapters import Chosen, adapter_key
from ..sampling import CustomSampler
from ..sampling.device import fits_device
from ..sampling.state import IdRow
from .automaton import automaton
from .events import Event, event, streaming
from .filter import Filter
from .filter.ahead import MasksAhead
from .filter.base import filter_faults
from .guidance import guided_prompts
from .masks import combine
from .options import (
    JobOptions,
    check_forced,
    checked_filters,
    listed,
    note_unknown,
    own_random,
    own_sampler,
    prompt_ids,
)
from .pages import Page, PageTable, root_key
from .reports import PromptReport, Rows, report
from .rounds import Rounds
from .sequence import Sequence
from .setup import choose_adapters
from .stops import loop_rule, split_conditions
from .stream import Outcome, StreamRules, TextStream, Token
from .text import make_decoder
from .timing import Timing


@dataclass(frozen=True, slots=True)
class Draw:
    """What one token is drawn with."""

    sampler: CustomSampler
    key: int
    past_ids: IdRow
    mask: Tensor | None


class JobState(Enum):
    """Where a job is."""

    NEW = 0
    PENDING = 1
    PREFILL = 2
    DECODE = 3
    FINISHED = 4


class Job:
    """A request to continue a prompt.

    `sequences` are the prompt with its answer and, with guidance, the negative prompt with the same
    answer. They have pages and places of their own, and get every token together. Figures of the
    prompt, of pages and of progress count both.

    Args:
        input_ids: long (1, L), L >= 1; or a list of one, or two for guidance: [prompt, negative
            prompt], of any lengths.
        cfg_scale: strength of the guidance, see `guidance.py`: 1 is off, 0 follows the negative
            prompt alone, usual values are 1.2 to 2.
        Others: see `doc/generator.md`.
    Raises:
        ConfigError: an argument of a wrong kind or value.
        ShapeError: `input_ids`.
    """

    def __init__(
        self,
        input_ids: Tensor | list[Tensor],
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        sampler: Any = None,
        seed: int | None = None,
        stop_conditions: Any = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: list[Filter] | None = None,
        token_healing: bool = False,
        identifier: Any = None,
        banned_strings: list[str] | None = None,
        embeddings: list[Any] | None = None,
        max_rq_tokens: int | None = None,
        stop_on_loop: tuple[int, int] | None = None,
        rq_state: Any = None,
        loras: Any = None,
        return_prompt_logprobs: int | None = None,
        cfg_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        note_unknown("Job", kwargs)
        self.options = JobOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            max_skips=max_skips,
            max_rq_tokens=max_rq_tokens,
            return_top_tokens=return_top_tokens or 0,
            return_logits=return_logits,
            return_probs=return_probs,
            decode_special_tokens=decode_special_tokens,
            token_healing=token_healing,
            return_prompt_logprobs=return_prompt_logprobs,
        )
        prompts, self.cfg_scale = guided_prompts(input_ids, cfg_scale)
        self.prompt_tokens = sum(ids.size for ids in prompts)
        self.sequences = [Sequence(ids) for ids in prompts]
        self.rounds = Rounds(self.sequences, max_new_tokens, max_rq_tokens)
        self.sampler = own_sampler(sampler)
        self._fits_device = fits_device(self.sampler)
        self.filters = checked_filters(filters)
        self.masks_ahead = MasksAhead(self.filters)
        self.embeddings = listed("embeddings", embeddings)
        self.identifier = identifier
        self.loras = loras  # None: all that are loaded when the job is enqueued
        self.adapters: Chosen = ()
        self.adapter_key = b""  # tells its pages from those of other adapters
        self._random = own_random(seed)
        self._stop_conditions = stop_conditions
        self._banned_strings = listed("banned_strings", banned_strings, str)
        self._stop_on_loop = loop_rule(stop_on_loop)
        self._clear()

    def _clear(self) -> None:
        """What is known before the job starts."""
        self.generator: Any = None
        self.serial_number = -1
        self.state = JobState.NEW
        self.skips = 0
        self.new_tokens = 0
        self.cached_pages = 0
        self.cached_tokens = 0
        self.total_pages = 0
        self.accepted_draft_tokens = 0
        self.rejected_draft_tokens = 0
        self.draft_stats: list[Any] = []
        self.drafted = False  # the generator drafts; these two are its notes on this job
        self.draft_length: Any = None
        self.draft_state: Any = None
        self.tried_at = -1  # version of the page table when pages were last asked for in vain
        self.turn = 0  # among jobs that ingest their prompts: the lowest goes first
        self.first_round = True
        self.requeued = False
        self.cache_full = False
        self.timing = Timing()
        self.stream: TextStream | None = None
        self.prompt_report: PromptReport | None = None  # until it is complete
        self._draw: Draw | None = None  # of the next token
        self._forced: list[int] = []
        self._memory: Any = None  # of the sampler, before the last draw
        self._banned_at: dict[int, list[int]] = {}  # position -> ids that led to a banned string
        self._healed_ids: list[int] | None = None  # what the first token may be
        self._healed = ""  # text that it begins with

    # What programs read

    @property
    def sequence(self) -> Sequence:
        return self.sequences[0]

    @property
    def full_completion(self) -> str:
        return "" if self.stream is None else self.stream.full_completion()

    @property
    def is_finished(self) -> bool:
        return self.state is JobState.FINISHED

    @property
    def non_sequential_pages(self) -> int:
        """Pages that do not follow their neighbour in the cache."""
        pairs = chain.from_iterable(pairwise(sequence.pages) for sequence in self.sequences)
        return sum(b.index != a.index + 1 for a, b in pairs)

    @property
    def time_enqueued(self) -> float:
        return self.timing.enqueued

    @property
    def time_prefill(self) -> float:
        return self.timing.prefill

    @property
    def time_generate(self) -> float:
        return self.timing.generate

    def is_prefill_done(self) -> bool:
        return all(sequence.is_ingested for sequence in self.sequences)

    def is_running(self) -> bool:
        """In the queue or active."""
        return self.state in (JobState.PENDING, JobState.PREFILL, JobState.DECODE)

    def constrain_output_now(self, ids: Tensor) -> None:
        """The next tokens are exactly `ids` (1, n); then sampling resumes.

        Raises:
            ConfigError: an id that the model does not have; at `enqueue` if that comes later.
        """
        forced = prompt_ids(ids).tolist()
        if self.generator is not None:
            check_forced(forced, self._width)
        self._forced.extend(forced)

    # Start

    def prepare(self, generator: Any, serial_number: int) -> None:
        """Make ready for a generator. Raises what `Generator.enqueue` says."""
        if self.state is not JobState.NEW:
            raise ConfigError("this job was enqueued before; make a new one")
        tokenizer = generator.tokenizer
        if self.options.token_healing and self._healed_ids is None and len(self.sequence) > 1:
            self._healed = self._prepare_healing(tokenizer)
        tokens, strings = split_conditions(self._stop_conditions, tokenizer)
        self._stop_tokens = sorted(tokens)
        rules = StreamRules(
            frozenset(tokens),
            automaton(frozenset(strings), frozenset(self._banned_strings)),
            self._stop_on_loop,
        )
        special = self.options.decode_special_tokens
        self._width = generator.num_columns
        self.adapters = choose_adapters(generator.model, self.loras)
        self.adapter_key = adapter_key(self.adapters)
        for sequence in self.sequences:
            sequence.root = root_key(self.adapter_key)
        check_forced(self._forced, self._width)
        if len(self.sequences) > generator.max_batch_size:
            raise ConfigError(
                "a job with a negative prompt runs two sequences at once, max_batch_size is"
                f" {generator.max_batch_size}"
            )
        self.rounds.check(generator.max_total_tokens)
        self._report_prompt(self.options.return_prompt_logprobs)
        self.generator = generator
        try:
            for filter in self.filters:
                filter.attach(self)
        except Exception:
            self.generator = None
            raise
        pieces = tokenizer.get_id_to_piece_list(True)
        self.stream = TextStream(
            rules,
            lambda: make_decoder(tokenizer, special),
            lambda token: pieces[token] if token < len(pieces) else "",
            self._healed,
        )
        self.serial_number = serial_number
        self.state = JobState.PENDING
        self.timing.to("enqueued")

    def _prepare_healing(self, tokenizer: Any) -> str:
        """Drop the last prompt token; returns its text, with which the first token must begin. A
        negative prompt loses it, too, if it ends in the same token and has others."""
        last = int(self.sequence.input_ids.numpy()[-1])
        pieces = tokenizer.get_id_to_piece_list(False)
        piece = pieces[last] if 0 <= last < len(pieces) else ""
        if not piece or "\ufffd" in piece:
            return ""
        self._healed_ids = [int(i) for i in tokenizer.get_tokens_with_prefix_id(last)]
        for sequence in self.sequences:
            if sequence.input_ids.last() == last and len(sequence) > 1:
                sequence.input_ids.truncate(len(sequence) - 1)
        return piece

    def _report_prompt(self, top: int | None) -> None:
        if top is not None and len(self.sequence) > 1:
            ids = self.sequence.input_ids
            self.prompt_report = PromptReport(ids, len(ids), top, self._width)
            self.sequence.fresh = True

    def missing_pages(self, table: PageTable) -> int:
        """Free pages that the next round lacks; 0 or less if there are enough."""
        return self.rounds.missing(table, self.new_tokens, self._num_held())

    def try_start(self, table: PageTable) -> bool:
        """Take pages for a round; False if too few are free."""
        if self.tried_at == table.version:
            return False
        found = self.rounds.take(table, self.new_tokens, self._num_held())
        if found is None:
            self.tried_at = table.version
            return False
        self.total_pages = len(self.pages())
        if self.first_round:
            self.cached_pages, self.cached_tokens = found
            self.first_round = False
        self.skips = 0
        self.state = JobState.DECODE if self.is_prefill_done() else JobState.PREFILL
        if self.state is JobState.DECODE:
            self.timing.to("prefill")
        return True

    # Tokens

    def _num_held(self) -> int:
        """Tokens at the end that may be taken back."""
        return len(self.stream.held) if self.stream is not None else 0

    def final_length(self, sequence: Sequence) -> int:
        """Leading tokens of one of the sequences that will not be taken back."""
        return len(sequence) - self._num_held()

    def pages(self) -> list[Page]:
        """All pages held; one that two sequences share twice."""
        return [page for sequence in self.sequences for page in sequence.pages]

    def store(self, table: PageTable) -> None:
        """Note that every token is in the pages now."""
        for sequence in self.sequences:
            sequence.store(table, len(sequence), self.final_length(sequence))

    def mask(self) -> Tensor | None:
        """What may be drawn now; None for anything."""
        banned = self._banned_at.get(len(self.sequence), ())
        if self.new_tokens < self.options.min_new_tokens:
            banned = [*banned, *self._stop_tokens]
        only = self._healed_ids if self.new_tokens == 0 else None
        if not (banned or self.filters or only):
            return None
        # The healed token is a piece of the prompt: filters do not see it.
        masks = self.masks_ahead.take() if self.filters and not only else []
        return combine(masks, banned, only, self._width)

    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits, nothing masked or forced."""
        return (
            isinstance(self.sampler, CustomSampler)
            and self.sampler.is_greedy
            and not (self.filters or self._forced or self._banned_at or self._healed_ids)
            and self.new_tokens >= self.options.min_new_tokens
        )

    def draft_room(self) -> int:
        """Tokens that can be checked behind the last one: as many as fit the pages held, and one
        less than are still wanted, as a right draft gives one token more. None while the next
        tokens are forced."""
        if self._forced:
            return 0
        room = min(sequence.room for sequence in self.sequences)
        limit = self.options.max_new_tokens
        return room if limit is None else min(room, limit - self.new_tokens - 1)

    def goes_on(self, token: int) -> bool:
        """Whether a step may follow this next token, by its number alone: it has a place in the
        pages held, and neither ends the job nor is the last."""
        return (
            all(sequence.room > 0 for sequence in self.sequences)
            and token not in self._stop_tokens
            and self.new_tokens + 1 < self.rounds.most
            and self.new_tokens + 1 != self.options.max_new_tokens
        )

    def plan_draw(self) -> Draw | None:
        """What the next token is drawn with, if its sampler can run on a device; the same again
        until a token is taken. None: `choose` must draw it."""
        if self._forced or not self._fits_device:
            return None
        try:
            return self._next_draw()
        except Exception:  # it comes up again in `choose`, which may raise
            return None

    def _next_draw(self) -> Draw:
        if self._draw is None:
            assert isinstance(self.sampler, CustomSampler)
            mask, key = self.mask(), self._random.getrandbits(32)
            self._draw = Draw(self.sampler, key, self.sequence.input_ids.numpy(), mask)
        return self._draw

    def choose(self, logits: Rows, row: int) -> int:
        """Draw from a row of logits."""
        if isinstance(self.sampler, CustomSampler):
            self._memory = self.sampler.memory()
        if self._forced:
            return self._forced.pop(0)
        if isinstance(self.sampler, CustomSampler):
            draw = self._next_draw()
            row_logits = logits.known[row]
            return self.sampler.draw(
                row_logits, key=draw.key, past_ids=draw.past_ids, mask=draw.mask
            )
        mask = self.mask()
        key = self._random.getrandbits(32)
        past = self.sequence.input_ids.torch() if self.sampler.reqs_past_ids else None
        tensor = logits.raw[row].view(1, 1, -1)
        return int(self.sampler.forward(tensor, past, key, self.generator.tokenizer, mask))

    def accept(self, token: int, logits: Rows, row: int) -> Event:
        """Take a token, drawn from a row of logits, and say what comes of it."""
        position = len(self.sequence)
        self._draw = None
        for sequence in self.sequences:
            sequence.input_ids.append(token)
        self.new_tokens += 1
        done = False
        if self.filters and not (self._healed_ids and self.new_tokens == 1):
            self.masks_ahead.drop()
            with filter_faults():
                for filter in self.filters:
                    done |= filter.feed(token)
        if self._banned_at:  # masks further on were for a text that is gone
            first = self.final_length(self.sequence) - 1
            self._banned_at = {k: v for k, v in self._banned_at.items() if first <= k <= position}
        full = self.new_tokens >= self.rounds.most
        limit = self.new_tokens == self.options.max_new_tokens
        assert self.stream is not None
        told = report(token, logits, row, self.options)
        told.memory = self._memory
        outcome = self.stream.push(told, limit=limit or full, filter_done=done)
        if outcome.suppressed is not None:
            self._take_back(outcome.suppressed)
        elif outcome.reason is not None:
            self.cache_full = full and not limit and outcome.reason == "max_new_tokens"
            return self.end(outcome)
        return streaming(self, outcome)

    def _take_back(self, tokens: list[Token]) -> None:
        for sequence in self.sequences:
            sequence.rewind(len(sequence) - len(tokens))
        length = len(self.sequence)
        self.new_tokens -= len(tokens)
        fed = len(tokens) - (self._healed_ids is not None and self.new_tokens == 0)
        with filter_faults():
            for filter in self.filters:
                filter.rewind(fed)
        if isinstance(self.sampler, CustomSampler):
            self.sampler.restore(tokens[0].memory)
        self._banned_at = {k: v for k, v in self._banned_at.items() if k <= length}
        self._banned_at.setdefault(length, []).append(tokens[0].id)

    def must_requeue(self) -> bool:
        """Whether the last token has no place in the pages held."""
        return any(sequence.room < 0 for sequence in self.sequences)

    # End

    def end(self, outcome: Outcome, **more: Any) -> Event:
        """The final event; the job is finished."""
        self.timing.to("")
        self.state = JobState.FINISHED
        self.adapters = ()
        self._detach_filters()
        out = streaming(self, outcome)
        if self.cache_full:
            out["cache_full"] = True
        out.update(more)
        return out

    def end_early(self, reason: str, **more: Any) -> Event:
        """End for a reason that no token gave."""
        assert self.stream is not None
        return self.end(self.stream.finish(reason), **more)

    def drop(self) -> None:
        """Cancelled: finished without an event."""
        self.state = JobState.FINISHED
        self.adapters = ()
        self.timing.to("")
        self._detach_filters()

    def _detach_filters(self) -> None:
        self.masks_ahead.drop()
        for filter in self.filters:
            filter.detach()

    def requeue(self, out: Event) -> None:
        """Back to the queue with the text so far; `out` is the event of the last token."""
        self.state = JobState.PENDING
        self.requeued = True
        self.tried_at = -1
        self.timing.to("enqueued")
        out["requeue"] = True

    def started(self) -> Event:
        return event(self, "started")

    def progress(self) -> Event:
        """The event of an ingested chunk."""
        return event(
            self,
            "prefill",
            curr_progress=sum(sequence.stored for sequence in self.sequences),
            max_progress=sum(len(sequence) - 1 for sequence in self.sequences),
            **self._prompt_keys(),
        )

    def _prompt_keys(self) -> dict[str, Tensor]:
        if self.prompt_report is None:
            return {}
        told = self.prompt_report.take()
        if self.prompt_report.is_complete:
            self.prompt_report, self.sequence.fresh = None, False
        return told
