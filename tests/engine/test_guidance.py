"""Classifier-free guidance: two sequences of one job, against two plain passes."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from exl3 import Cache, CacheLayer_quant, Config, Model, Tokenizer
from exl3.errors import CacheFullError, ConfigError, ShapeError
from exl3.generator import AsyncGenerator, AsyncJob, Generator, Job
from exl3.generator.guidance import combine
from exl3.generator.sampler import (
    ArgmaxSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    SS_BanTokens,
    SS_Sample,
)
from exl3.integration.transformers import patch_transformers
from tests.engine.fake import FakeCache, FakeModel, drafting
from tests.engine.reference import run_alone
from tests.engine.test_generator import prompt, run, text, tokens
from tests.engine.test_real_model import DIRECTORY

BAD, GOOD = prompt(40, 3), prompt(30)


def pair(positive, negative, scale, **kwargs) -> Job:
    kwargs.setdefault("sampler", ArgmaxSampler())
    kwargs.setdefault("max_new_tokens", 10)
    return Job([torch.tensor([positive]), torch.tensor([negative])], cfg_scale=scale, **kwargs)


def logits_of(events: list[dict]) -> torch.Tensor:
    return torch.cat([event["logits"][0] for event in events if "logits" in event])


def expect(model, events, positive, negative, scale, limit=10, sampler=None, **kwargs) -> None:
    sampler = sampler or ArgmaxSampler()
    want = run_alone(
        model, positive, limit, sampler=sampler, negative=negative, scale=scale, **kwargs
    )
    last = events[-1]
    assert (tokens(events), text(events), last["eos_reason"]) == want


@pytest.mark.parametrize("lengths", [(1, 1), (30, 1), (1, 257), (256, 255), (300, 513), (700, 20)])
@pytest.mark.parametrize("scale", [0, 0.3, 1.5, 7, 1e6])
def test_against_two_passes(make, lengths: tuple[int, int], scale: float) -> None:
    positive, negative = prompt(lengths[0]), prompt(lengths[1], 3)
    sampler = DefaultSampler()
    generator = make(8)
    item = pair(positive, negative, scale, max_new_tokens=30, sampler=sampler, seed=5)
    events = run(generator, item)[item]
    expect(generator.model, events, positive, negative, scale, 30, sampler, seed=5)
    last = events[-1]
    assert last["prompt_tokens"] == sum(lengths) and last["new_tokens"] == 30
    assert item.total_pages == sum((length + 29 + 255) // 256 for length in lengths)
    steps = [event for event in events if event["stage"] == "prefill"]
    assert all(event["max_progress"] == sum(lengths) - 2 for event in steps)
    assert not steps or steps[-1]["curr_progress"] == sum(lengths) - 2


def test_guidance_leads_away(make) -> None:
    """The answers differ from each other: the tests above compare something."""
    model = make().model
    said = {
        scale: tuple(
            run_alone(model, GOOD, 10, sampler=ArgmaxSampler(), negative=BAD, scale=scale)[0]
        )
        for scale in (0, 1, 3)
    }
    assert len(set(said.values())) == 3


def test_the_ends_of_the_scale(make) -> None:
    """1 is no guidance, and runs one sequence; 0 is the negative prompt alone."""
    for scale, plain in ((1, GOOD), (1.0, GOOD), (0, BAD)):
        generator = make()
        item = pair(GOOD, BAD, scale)
        alone = Job(torch.tensor([plain]), 10, sampler=ArgmaxSampler())
        events = run(generator, item, alone)
        assert tokens(events[item]) == tokens(events[alone])
        assert len(item.sequences) == (1 if scale == 1 else 2)


@pytest.mark.parametrize("scale", [0, 1, 2.5, 1e6])
@pytest.mark.parametrize("length", [1, 40, 600])
def test_equal_prompts_are_no_guidance(make, scale: float, length: int) -> None:
    """To the bit, penalties that look at the sign of a logit included."""
    sampler = ComboSampler(rep_p=1.3, temperature=0.9, top_p=0.9)
    options = {"sampler": sampler, "seed": 3, "return_logits": True, "max_new_tokens": 20}
    guided = pair(prompt(length), prompt(length), scale, **options)
    plain = Job(torch.tensor([prompt(length)]), **options)
    generator = make(8)
    events = run(generator, guided, plain)
    assert torch.equal(logits_of(events[guided]), logits_of(events[plain]))
    assert tokens(events[guided]) == tokens(events[plain])


def test_prompts_share_their_start(make) -> None:
    """Equal full pages are computed once and held twice."""
    generator = make(8)
    start = prompt(600)
    item = pair([*start, 100], [*start, 101, 102], 2.0)
    generator.enqueue(item)
    while not item.is_prefill_done():
        generator.iterate()
        generator.check_integrity()
    first, second = (sequence.pages for sequence in item.sequences)
    assert first[:2] == second[:2] and first[2] is not second[2]
    assert item.cached_pages == 2 and item.cached_tokens > 512
    generator.cancel(item)
    assert generator.pagetable.num_free == 8


def test_pages_of_one_are_not_given_up_for_the_other(make) -> None:
    """The oldest pages are those that the negative prompt is about to use."""
    generator = make(5)
    for ids in (prompt(513, 3), prompt(300, 1)):
        run(generator, Job(torch.tensor([ids]), 5, sampler=ArgmaxSampler()))
    item = pair(prompt(300), prompt(513, 3), 2)
    events = run(generator, item)[item]
    assert item.cached_pages == 2
    expect(generator.model, events, prompt(300), prompt(513, 3), 2)


def test_a_page_for_both_is_counted_once(make) -> None:
    generator = make(4)
    run(generator, Job(torch.tensor([prompt(300)]), 5, sampler=ArgmaxSampler()))
    filler = Job(torch.tensor([prompt(20, 1)]), 50, sampler=ArgmaxSampler())
    item = pair(prompt(300), prompt(300), 2)
    generator.enqueue([filler, item])
    generator.iterate()
    generator.check_integrity()
    assert generator.num_active_jobs() == 2 and generator.pagetable.num_free == 0


def refuse(match: str, *args, kind: type = ConfigError, **kwargs) -> None:
    with pytest.raises(kind, match=match):
        Job(*args, **kwargs)


def test_bad_arguments() -> None:
    ids = torch.tensor([GOOD])
    refuse("3 prompts.*a Job of each", [ids] * 3, cfg_scale=2)
    refuse("give its strength too, cfg_scale=", [ids] * 2)
    refuse("no negative prompt: give two", ids, cfg_scale=2)
    refuse("no negative prompt: give two", [ids], cfg_scale=0)
    for scale in (math.nan, math.inf, -math.inf, -0.5, 1e7, "2", True, torch.tensor(2.0), [2]):
        refuse("cfg_scale is .*expected a number from 0", [ids] * 2, cfg_scale=scale)
    refuse("expected long", torch.zeros(2, 3, dtype=torch.long), kind=ShapeError)
    refuse("expected long", [ids, ids[:, :0]], cfg_scale=2, kind=ShapeError)
    refuse("expected long", [ids, ids[:, :0]], cfg_scale=1, kind=ShapeError)
    refuse("expected a tensor", [ids, None], cfg_scale=2, kind=ShapeError)
    refuse("expected a tensor", [], kind=ShapeError)
    assert Job([ids], cfg_scale=1).cfg_scale == Job(ids).cfg_scale == 1.0


def test_bad_requests(make) -> None:
    generator = make(2)
    with pytest.raises(ConfigError, match="negative prompt token 1 is 9999"):
        generator.enqueue(pair(GOOD, [5, 9999], 2))
    with pytest.raises(ConfigError, match="two sequences at once, max_batch_size is 1"):
        make(2, max_batch_size=1).enqueue(pair(GOOD, BAD, 2))
    assert generator.num_remaining_jobs() == 0


def test_the_cache_must_hold_both(make) -> None:
    """Each in pages of its own: the longest that fits, and one more token on either side."""
    generator = make(3)
    for lengths, limit in (((257, 256), 1), ((200, 458), 55), ((1, 1), 256)):
        item = pair(prompt(lengths[0]), prompt(lengths[1], 3), 2, max_new_tokens=limit)
        events = run(generator, item)[item]
        expect(generator.model, events, prompt(lengths[0]), prompt(lengths[1], 3), 2, limit)
    for lengths, limit in (((257, 257), 1), ((200, 458), 56), ((200, 700), 10), ((1, 1), 513)):
        with pytest.raises(CacheFullError, match=rf"a prompt of {lengths[0]} and {lengths[1]} tok"):
            generator.enqueue(pair(prompt(lengths[0]), prompt(lengths[1]), 2, max_new_tokens=limit))
    for options in ({"max_new_tokens": None}, {"max_new_tokens": 500, "max_rq_tokens": 1}):
        with pytest.raises(CacheFullError, match="places in the cache, which has 768"):
            generator.enqueue(pair(prompt(257), prompt(257), 2, **options))


def test_without_a_limit_until_the_cache_is_full(make) -> None:
    generator = make(3)
    item = pair(prompt(200), prompt(20, 3), 1.5, max_new_tokens=None)
    events = run(generator, item)[item]
    # 313 tokens: 200 + 312 and 20 + 312 places, two pages each, would be four; 237 fit one and two.
    assert events[-1]["new_tokens"] == 237 and events[-1]["cache_full"]
    expect(generator.model, events, prompt(200), prompt(20, 3), 1.5, 237)


def test_requeue(make) -> None:
    generator = make(4)
    options = {"max_new_tokens": 300, "max_rq_tokens": 1, "sampler": DefaultSampler(), "seed": 1}
    item = pair(prompt(200), prompt(100, 3), 1.5, **options)
    events = run(generator, item)[item]
    rounds = [e["stage"] for e in events].count("started")
    assert rounds == 3  # a page of one was full, then one of the other
    expect(generator.model, events, prompt(200), prompt(100, 3), 1.5, 300, DefaultSampler(), seed=1)


def test_preemption(make) -> None:
    """A page that both sequences of the youngest hold comes free with them."""
    generator = make(6)
    greedy = {"sampler": ArgmaxSampler()}
    first = Job(torch.tensor([prompt(300)]), 5, **greedy)
    filler = Job(torch.tensor([prompt(20, 1)]), 200, **greedy)
    generator.enqueue([first, filler])
    while not first.new_tokens:
        generator.iterate()
    old = Job(torch.tensor([prompt(1200, 2)]), 3, max_skips=1, **greedy)
    young = pair(prompt(300), prompt(300), 2, max_new_tokens=200)
    generator.enqueue([old, young])
    events = []
    while generator.num_remaining_jobs():
        events += generator.iterate()
        generator.check_integrity()
    ends = [event["job"] for event in events if event["eos"]]
    assert ends == [first, old, filler, young]  # the old one waited for nobody else
    assert generator.metrics["preemptions"] == 1
    mine = [event for event in events if event["job"] is young]
    expect(generator.model, mine, prompt(300), prompt(300), 2, 200)


def test_the_batch_counts_sequences(make) -> None:
    generator = make(16, max_batch_size=3)
    jobs = [pair(prompt(10, i), prompt(20, i), 2, max_new_tokens=30) for i in range(3)]
    jobs += [Job(torch.tensor([prompt(5)]), 20, sampler=ArgmaxSampler())]
    generator.enqueue(jobs)
    widest = 0
    while generator.num_remaining_jobs():
        generator.iterate()
        widest = max(widest, sum(len(item.sequences) for item in generator.active_jobs))
    assert widest == 3 and max(rows for rows, _ in generator.model.forwards) == 3


@pytest.mark.parametrize("stage", ["queued", "first", "second", "decode", "ended"])
def test_cancel(make, stage: str) -> None:
    generator = make(8, max_chunk_size=256)
    item = pair(prompt(600), prompt(700, 3), 2)
    generator.enqueue(item)
    first, second = item.sequences
    until = {
        "queued": lambda: True,
        "first": lambda: first.stored > 0,
        "second": lambda: second.stored > 256,
        "decode": lambda: item.new_tokens > 2,
        "ended": lambda: item.is_finished,
    }[stage]
    while not until():
        generator.iterate()
    if stage == "second":
        assert first.is_ingested and not item.is_prefill_done()
    generator.cancel(item)
    generator.cancel(item)
    generator.check_integrity()
    assert generator.pagetable.num_free == 8 and not generator.num_remaining_jobs()
    again = pair(prompt(600), prompt(700, 3), 2)
    expect(generator.model, run(generator, again)[again], prompt(600), prompt(700, 3), 2)
    assert (again.cached_tokens > 0) == (stage != "queued")


def test_banned_strings_take_back_both(make) -> None:
    generator = make(8)
    banned, sampler = ["ab", "c", "de"], DefaultSampler()
    item = pair(
        *(prompt(250), prompt(254, 3), 1.5),
        max_new_tokens=60,
        banned_strings=banned,
        sampler=sampler,
        seed=2,
    )
    events = run(generator, item)[item]
    assert any("suppressed_text" in event for event in events)
    said = tokens(events)
    for sequence, ids in zip(item.sequences, (prompt(250), prompt(254, 3)), strict=True):
        assert sequence.input_ids.numpy().tolist() == ids + said
    assert not [s for s in banned if s in events[-1]["full_completion"]]


def test_token_healing(make) -> None:
    """The prompts lose their last token if it is the same; the first answer begins with it."""
    a, b = 3 + 97, 3 + 98
    for negative, kept in (([b, a], [b]), ([a, b], [a, b]), ([a], [a])):
        generator = make()
        item = pair([b, b, a], negative, 2, token_healing=True)
        events = run(generator, item)[item]
        first = item.sequences[0].input_ids.numpy()[2]
        assert generator.tokenizer.bytes[first].startswith(b"a")
        said = [first, *tokens(events)[-9:]]
        assert item.sequences[0].input_ids.numpy().tolist() == [b, b, *said]
        assert item.sequences[1].input_ids.numpy().tolist() == [*kept, *said]


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts_are_checked_on_both(make, kind: str) -> None:
    model = FakeModel(letters=b"ab", spread=3.0)
    sampler = DefaultSampler()
    generator = make(8, model, **drafting(model, 8, kind, num_draft_tokens=3))
    positive, negative = prompt(250), prompt(100, 3)
    item = pair(positive, negative, 1.2, max_new_tokens=40, sampler=sampler, seed=1)
    events = run(generator, item)[item]
    expect(model, events, positive, negative, 1.2, 40, sampler, seed=1)
    assert events[-1]["accepted_draft_tokens"] > 3 and events[-1]["rejected_draft_tokens"] > 0
    assert max(rows for rows, _ in model.forwards) == 8


def test_negative_prompts_are_in_the_draft_cache(make) -> None:
    """What they have filled serves others, and is not run again."""
    model = FakeModel(letters=b"ab", spread=3.0)
    options = drafting(model, 8, "model")
    generator = make(8, model, **options)
    run(generator, pair(prompt(20), prompt(700, 3), 1.2, max_new_tokens=100))
    before = len(options["draft_model"].forwards)
    other = pair(prompt(30), prompt(700, 3), 1.2)
    expect(model, run(generator, other)[other], prompt(30), prompt(700, 3), 1.2)
    told = options["draft_model"].forwards[before:]
    assert other.cached_pages == 2 and max(count for _, count in told) < 256
    plain = Job(torch.tensor([prompt(700, 3)]), 20, sampler=ArgmaxSampler())
    got = run(generator, plain)[plain]
    assert tokens(got) == run_alone(model, prompt(700, 3), 20, sampler=ArgmaxSampler())[0]


def test_a_pass_has_rows_for_both(make) -> None:
    model = FakeModel(letters=b"ab", spread=3.0)
    generator = make(16, model, **drafting(model, 16, "model", num_draft_tokens=16))
    jobs = [pair(prompt(20, i), prompt(30, i), 1.2, max_new_tokens=40) for i in range(3)]
    run(generator, *jobs)
    assert max(rows for rows, _ in model.forwards) == 16


class Holes(FakeModel):
    """Some tokens have no probability at all, others only after some contexts."""

    def logits_of(self, context):
        logits = super().logits_of(context)
        logits[100:103] = -math.inf
        logits[103 + int(context[-1]) % 3] = -math.inf
        return logits


@pytest.mark.parametrize("scale", [0, 0.5, 2, 1e6])
def test_masked_tokens_stay_masked(make, scale: float) -> None:
    generator = make(8, Holes(letters=b"abcdef"))
    item = pair(
        *(GOOD, BAD, scale),
        sampler=CustomSampler([SS_BanTokens([106]), SS_Sample()]),
        max_new_tokens=60,
        return_logits=True,
        return_probs=True,
    )
    events = run(generator, item)[item]
    logits = logits_of(events)
    assert not logits.isnan().any() and not logits.isposinf().any()
    assert logits[:, 100:103].isneginf().all()
    assert set(tokens(events)).isdisjoint((100, 101, 102, 106))
    assert all(0 < p <= 1 for e in events if "token_probs" in e for p in e["token_probs"][0])


def test_infinities_and_equal_rows() -> None:
    infinite = -math.inf
    positive = torch.tensor([[1.0, infinite, 2.0, infinite, 5.0]])
    negative = torch.tensor([[3.0, 1.0, infinite, infinite, 5.0]])
    rows = torch.cat([positive, negative, positive])
    got = combine(rows, [(1, 3.0), (1, 1.0)])
    assert got[0].tolist() == [-3.0, infinite, infinite, infinite, 5.0]
    assert torch.equal(got[1:], positive) and torch.equal(rows[:1], positive)
    assert combine(rows, [(2, 1.0), (1, 1.0)]) is rows
    odd = torch.randn(2, 999).repeat(2, 1)
    assert torch.equal(combine(odd, [(2, 1e6)]), odd[:2])


def test_reported_probabilities_are_the_guided_ones(make) -> None:
    generator = make()
    model, width = generator.model, generator.num_columns
    item = pair(GOOD, BAD, 1.7, return_probs=True, return_top_tokens=3, return_prompt_logprobs=0)
    events = run(generator, item)[item]
    said, step = tokens(events), 0
    for event in (e for e in events if "token_probs" in e):
        logs = [
            torch.from_numpy(model.reference_logits([*ids, *said[:step]])[:width]).double()
            for ids in (GOOD, BAD)
        ]
        good, bad = (row.log_softmax(-1) for row in logs)
        want = (bad + 1.7 * (good - bad)).softmax(-1).float()
        torch.testing.assert_close(event["token_probs"][0, 0], want[said[step]])
        torch.testing.assert_close(event["top_k_probs"][0, 0], want.topk(3).values)
        step += event["token_ids"].shape[1]
    assert step == 10
    told = [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e]
    assert torch.cat(told, 1)[0].tolist() == GOOD[1:]  # of the prompt, not of the negative one


def test_generate(make) -> None:
    generator = make()
    options = {"sampler": ArgmaxSampler(), "completion_only": True, "cfg_scale": 2}
    said = generator.generate(["ab", "cd"], 8, negative_prompt="fed", **options)
    encode = [[3 + byte for byte in word] for word in (b"ab", b"cd", b"fed")]
    for answer, ids in zip(said, encode[:2], strict=True):
        want = run_alone(
            generator.model, ids, 8, sampler=ArgmaxSampler(), negative=encode[2], scale=2
        )
        assert answer == want[1]
    one = generator.generate("ab", 8, negative_prompt="fed", **options)
    several = generator.generate(["ab", "cd"], 8, negative_prompt=["fed", "ab"], **options)
    assert one == several[0] == said[0]
    with pytest.raises(ConfigError, match="negative_prompt has 1 entries"):
        generator.generate(["ab", "cd"], 8, negative_prompt=["fed"], **options)
    with pytest.raises(ConfigError, match="no negative prompt"):
        generator.generate("ab", 8, **options)


def test_async(make) -> None:
    model = FakeModel(letters=b"abcdef \n")

    async def main() -> list[dict]:
        generator = AsyncGenerator(model, FakeCache(model, 2048), model.tokenizer)
        ids = [torch.tensor([GOOD]), torch.tensor([BAD])]
        item = AsyncJob(generator, ids, cfg_scale=2, max_new_tokens=10, sampler=ArgmaxSampler())
        events = [event async for event in item]
        await generator.close()
        return events

    expect(model, asyncio.run(main()), GOOD, BAD, 2)


@pytest.fixture(scope="module")
def loaded():
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache, quantised = Cache(model, 2048), Cache(model, 2048, CacheLayer_quant, k_bits=8, v_bits=8)
    model.load()
    yield model, (cache, quantised), Tokenizer.from_config(config)
    model.unload()


@pytest.mark.parametrize("which", [0, 1])
def test_a_real_model(loaded, which: int) -> None:
    """The logits of every step are those of two passes without a cache, on log-probabilities."""
    model, caches, tokenizer = loaded
    generator = Generator(model, caches[which], tokenizer)
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (1, length), generator=source) for length in (300, 20)]
    options = {"max_new_tokens": 6, "sampler": ArgmaxSampler(), "return_logits": True}
    item, plain = Job(prompts, cfg_scale=1.5, **options), Job(prompts[0], **options)
    events = run(generator, item, plain)
    got, unguided = (logits_of(events[x])[:, :500] for x in (item, plain))
    said = torch.tensor([tokens(events[item])])
    good, bad = (
        model.forward(torch.cat([ids, said], 1))[0, ids.shape[1] - 1 : -1, :500].log_softmax(-1)
        for ids in prompts
    )
    want = bad + 1.5 * (good - bad)
    # Of the plain job's rounding 1.5 + 0.5 times as much: see `test_real_model.check`.
    assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() < 0.3
    assert said[0].tolist() == got.argmax(-1).tolist()
    assert (got[0] - unguided[0]).abs().max() > 0.3


def test_transformers_guides_alike(loaded) -> None:
    """Its own implementation, on the same weights."""
    transformers = pytest.importorskip("transformers")
    patch_transformers()
    model, (cache, _), tokenizer = loaded
    prompts = [torch.randint(3, 500, (1, length)) for length in (20, 9)]
    item = Job(prompts, cfg_scale=3.0, max_new_tokens=8, sampler=ArgmaxSampler())
    said = tokens(run(Generator(model, cache, tokenizer), item)[item])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(DIRECTORY), dtype=torch.float32)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = theirs.generate(prompts[0], **options)
    guided = theirs.generate(
        prompts[0], guidance_scale=3.0, negative_prompt_ids=prompts[1], **options
    )
    assert said == guided[0, 20:].tolist() != plain[0, 20:].tolist()
