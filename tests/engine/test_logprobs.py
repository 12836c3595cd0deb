"""Probabilities of generated tokens and of the prompt, against the model itself."""

from __future__ import annotations

import asyncio

import pytest
import torch

from exl3.errors import ConfigError
from exl3.generator import AsyncGenerator, AsyncJob, Generator
from exl3.generator.sampler import DefaultSampler
from tests.engine.fake import FakeCache, FakeModel
from tests.engine.test_generator import expect_alone, job, prompt, run, text, tokens
from tests.engine.test_stream import Scripted, letters, say


def log_probs(model: FakeModel, ids: list[int]) -> torch.Tensor:
    """(tokens after the first, V) by the model's own definition."""
    width = model.tokenizer.actual_vocab_size
    rows = [model.reference_logits(ids[:count])[:width] for count in range(1, len(ids))]
    return torch.stack([torch.from_numpy(row) for row in rows]).log_softmax(-1)


def joined(events: list[dict], key: str) -> torch.Tensor:
    return torch.cat([e[key] for e in events if key in e], 1)


def check_prompt(model: FakeModel, ids: list[int], events: list[dict], top: int) -> None:
    told = [event for event in events if "prompt_token_ids" in event]
    assert {event["stage"] for event in told} == {"prefill"}
    assert joined(told, "prompt_token_ids").tolist() == [ids[1:]]
    want = log_probs(model, ids)
    own = want.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(joined(told, "prompt_logprobs")[0], own)
    if not top:
        assert "prompt_top_k_tokens" not in told[0]
        return
    best = want.topk(top, dim=-1)
    torch.testing.assert_close(joined(told, "prompt_top_k_logprobs")[0], best.values)
    assert joined(told, "prompt_top_k_tokens").shape == (1, len(ids) - 1, top)


@pytest.mark.parametrize("length", [2, 3, 256, 257, 258, 600])
@pytest.mark.parametrize("top", [0, 3])
def test_prompt(make, length: int, top: int) -> None:
    """Cold, then with the prompt in the cache: the same numbers, the same answer."""
    generator = make(16)
    ids = prompt(length)
    for _ in range(2):
        item = job(ids, return_prompt_logprobs=top)
        events = run(generator, item)[item]
        check_prompt(generator.model, ids, events, top)
        expect_alone(generator, item, events, ids, 10)
        assert events[-1]["cached_tokens"] == 0
    after = job(ids)
    events = run(generator, after)[after]
    assert events[-1]["cached_pages"] == (length - 1) // 256  # its pages are shared as usual
    assert not any("prompt_token_ids" in event for event in events)


def test_prompt_beside_others_that_share_it(make) -> None:
    generator = make(24, max_chunk_size=256)
    ids = prompt(700)
    items = [job(ids), job(ids, return_prompt_logprobs=2), job(ids[:600], return_prompt_logprobs=0)]
    events = run(generator, *items)
    check_prompt(generator.model, ids, events[items[1]], 2)
    check_prompt(generator.model, ids[:600], events[items[2]], 0)
    for item, own in zip(items, (ids, ids, ids[:600]), strict=True):
        expect_alone(generator, item, events[item], own, 10)


@pytest.mark.parametrize("step", [1, 300])
def test_prompt_and_requeue(make, step: int) -> None:
    generator = make(16)
    ids = prompt(400)
    item = job(ids, max_new_tokens=600, max_rq_tokens=step, return_prompt_logprobs=1)
    events = run(generator, item)[item]
    assert any(event.get("requeue") for event in events)
    check_prompt(generator.model, ids, events, 1)
    expect_alone(generator, item, events, ids, 600)


def test_prompt_of_one_token_and_bad_counts(make) -> None:
    generator = make()
    item = job([100], return_prompt_logprobs=2)
    assert not any("prompt_token_ids" in event for event in run(generator, item)[item])
    for bad in (-1, 1.5, "all"):
        with pytest.raises(ConfigError, match="return_prompt_logprobs"):
            job([100], return_prompt_logprobs=bad)


def test_prompt_with_more_alternatives_than_there_are_tokens(make) -> None:
    generator = make()
    item = job(prompt(5), return_prompt_logprobs=10_000)
    told = joined(run(generator, item)[item], "prompt_top_k_logprobs")
    assert told.shape == (1, 4, generator.num_columns)
    torch.testing.assert_close(told.exp().sum(-1), torch.ones(1, 4))


def test_a_reader_who_comes_late_gets_all_of_the_prompt() -> None:
    """Events that wait are joined; those of the prompt are not."""

    async def main() -> None:
        model = FakeModel()
        generator = AsyncGenerator(model, FakeCache(model, 256 * 12), model.tokenizer)
        ids = prompt(1500)
        item = AsyncJob(
            generator, torch.tensor([ids]), max_new_tokens=700, return_prompt_logprobs=0
        )
        while not item.job.is_finished:
            await asyncio.sleep(0)
        events = [event async for event in item]
        check_prompt(model, ids, events, 0)
        await generator.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (letters("ab stop it"), {"stop_conditions": "stop!"}),
        (letters("a\u00e9\u20ac\U0001f600b"), {}),
        (letters("ab sto"), {"stop_conditions": "stop"}),
        (letters("ab stop"), {"stop_conditions": "stop", "max_new_tokens": 9}),
        (letters("ab foo bar"), {"banned_strings": ["foo ba"], "max_new_tokens": 20}),
        ([*letters("ab st"), 1], {"stop_conditions": ["stop", 1], "max_new_tokens": 9}),
    ],
)
def test_one_entry_per_token_also_when_text_was_held(make, script, options) -> None:
    """Held tokens keep their own numbers; a cut takes them away with the tokens."""
    events = say(make, script, return_probs=True, return_top_tokens=2, **options)
    released = [event for event in events if "token_ids" in event]
    assert len(released) < len(events)  # something was held
    ids = tokens(events)
    for event in released:
        count = event["token_ids"].shape[1]
        assert event["token_probs"].shape == (1, count)
        assert event["top_k_tokens"].shape == event["top_k_probs"].shape == (1, count, 2)
    probs, top = joined(released, "token_probs")[0], joined(released, "top_k_probs")[0]
    model = Scripted([3 + i[0] if isinstance(i, bytes) else i for i in script], 5)
    width = model.tokenizer.actual_vocab_size
    for place, token in enumerate(ids):
        raw = model.reference_logits(prompt(5) + ids[:place])
        if place < len(model.script):
            raw[model.script[place]] = 50.0
        want = torch.from_numpy(raw[:width]).softmax(-1)
        torch.testing.assert_close(probs[place], want[token])
        torch.testing.assert_close(top[place], want.topk(2).values)
    held = events[-1].get("held", {})
    if "token_ids" in held:
        assert held["token_probs"].shape == held["token_ids"].shape


def test_drafts_report_like_single_steps(make) -> None:
    ids = prompt(40) * 3
    reports = []
    for options in ({}, {"ngram_match_min": 2, "num_draft_tokens": 4}):
        model = FakeModel(letters=b"ab", spread=3.0)
        generator = Generator(model, FakeCache(model, 2048), model.tokenizer, **options)
        item = job(ids, max_new_tokens=60, return_probs=True, sampler=DefaultSampler(), seed=1)
        events = run(generator, item)[item]
        assert len(text(events)) >= 60
        reports.append(joined(events, "token_probs"))
    torch.testing.assert_close(*reports)
