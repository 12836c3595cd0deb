"""`Generator.generate`: prompts in, texts out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .events import Event
from .job import Job

if TYPE_CHECKING:
    from .generator import Generator


@dataclass(frozen=True, slots=True)
class Prompts:
    """What differs between the jobs of one call."""

    prompt: str | list[str]
    negative_prompt: str | list[str] | None
    sampler: Any
    filters: Any
    embeddings: Any
    seed: int | None
    add_bos: bool
    encode_special_tokens: bool

    def __post_init__(self) -> None:
        self._check_texts("prompt", self.prompt)
        if self.negative_prompt is not None:
            self._check_texts("negative_prompt", self.negative_prompt)

    @staticmethod
    def _check_texts(name: str, given: Any) -> None:
        texts = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                f"{name} is {given!r:.60}, expected a str or a list of them; for token ids"
                " use enqueue(Job(ids))"
            )

    def jobs(self, tokenizer: Any, **same: Any) -> list[Job]:
        """One job per prompt; `same` goes to each."""
        texts = [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)
        out = []
        for index, text in enumerate(texts):
            embeddings = self._each("embeddings", self.embeddings, index, len(texts))
            negative = self._own("negative_prompt", self.negative_prompt, index, len(texts))
            ids = [
                tokenizer.encode(
                    prompt,
                    add_bos=self.add_bos,
                    encode_special_tokens=self.encode_special_tokens,
                    embeddings=embeddings,
                )
                for prompt in ([text] if negative is None else [text, negative])
            ]
            job = Job(
                ids,
                sampler=self._own("sampler", self.sampler, index, len(texts)),
                seed=None if self.seed is None else self.seed + index,
                filters=self._each("filters", self.filters, index, len(texts)),
                embeddings=embeddings,
                **same,
            )
            out.append(job)
        return out

    def _own(self, name: str, value: Any, index: int, count: int) -> Any:
        """One for all prompts, or an item of a list."""
        if not isinstance(value, list | tuple):
            return value
        return self._item(name, value, index, count)

    def _each(self, name: str, values: Any, index: int, count: int) -> Any:
        if values is None or isinstance(self.prompt, str):
            return values
        return self._item(name, values, index, count)

    def _item(self, name: str, values: Any, index: int, count: int) -> Any:
        if len(values) != count:
            raise ConfigError(f"{name} has {len(values)} entries, expected one per prompt: {count}")
        return values[index]

    def results(self, last: list[Event], completion_only: bool, with_last: bool) -> Any:
        """The texts, in the form that the caller asked for."""
        single = isinstance(self.prompt, str)
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        texts = [
            event["full_completion"] if completion_only else prompt + event["full_completion"]
            for prompt, event in zip(prompts, last, strict=True)
        ]
        answer = texts[0] if single else texts
        return (answer, last[0] if single else last) if with_last else answer


def run_prompts(generator: Generator, jobs: list[Job], abort_event: Any) -> list[Event] | None:
    """Run until the queue is empty. The final event of each job; None if aborted.

    Events of jobs that were queued before go to the next `iterate`. If a step raises, the jobs of
    this call are cancelled.
    """
    generator.enqueue(jobs)
    last: dict[Job, Event] = {}
    others = generator.take_events()
    mine = set(jobs)
    try:
        while generator.num_remaining_jobs():
            for event in generator.iterate():
                if event["job"] not in mine:
                    others.append(event)
                elif event["eos"]:
                    last[event["job"]] = event
            if abort_event is not None and abort_event.is_set():
                generator.clear_queue()
                return None
    finally:
        for job in jobs:
            generator.cancel(job)
        others += [event for event in generator.take_events() if event["job"] not in mine]
        generator.keep_events(others)
    return [last[job] for job in jobs]
