"""Drafting: what is proposed, how far, and that it changes nothing but the speed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3.errors import ConfigError, UnsupportedError
from exl3.generator import Generator
from exl3.generator.drafting.length import DraftLength, DraftOptions
from exl3.generator.drafting.ngram import SuffixAutomaton
from exl3.generator.drafting.speculation import MAX_ROWS, share
from exl3.generator.sampler import ArgmaxSampler, CategoricalSampler, DefaultSampler
from tests.engine.fake import FakeCache, FakeDraft, FakeModel, drafting
from tests.engine.test_generator import LETTERS, expect_alone, job, prompt, run, text, tokens

# What is proposed


def naive_match(ids: list[int], tail: list[int]) -> int:
    """Length of the longest suffix of ids + tail that occurs in ids, before its own place."""
    whole = ids + tail
    for length in range(len(whole) - 1, 0, -1):
        suffix, last = whole[-length:], len(whole) - length
        for at in range(min(last - 1, len(ids) - length) + 1):
            if whole[at : at + length] == suffix:
                return length
    return 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 2), max_size=24),
    tail=st.lists(st.integers(0, 2), max_size=4),
)
def test_longest_earlier_occurrence(ids: list[int], tail: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(ids):
        automaton.extend(token)
        length, place = automaton.match()
        assert length == naive_match(ids[: i + 1], [])
        assert ids[place - length : place] == ids[i + 1 - length : i + 1] and place <= i
    length, place = automaton.match(tail)
    whole = ids + tail
    assert length == naive_match(ids, tail)
    assert whole[place - length : place] == whole[len(whole) - length :]
    assert not length or place < len(whole)


def test_the_latest_occurrence_counts() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]:
        automaton.extend(token)
    assert automaton.match() == (2, 8)


def test_a_repeating_text_is_continued(make) -> None:
    model = FakeModel(letters=b"abc")
    generator = make(2, model, ngram_match_min=3, num_draft_tokens=8)
    item = job([103, 104, 105, 106, 104, 105, 106, 104, 105], max_new_tokens=30)
    seen = []
    propose = generator._speculation.drafter.propose
    generator._speculation.drafter.propose = lambda *a: seen.append(propose(*a)) or seen[-1]
    run(generator, item)
    assert seen[0] == [[106, 104, 105, 106, 104, 105, 106, 104]]


def test_ids_that_cannot_be_drawn_are_not_proposed(make) -> None:
    model = FakeModel(letters=b"abc")
    model.config.vocab_size = 300  # more than the tokenizer has
    generator = make(2, model, ngram_match_min=1)
    run(generator, job([100, 299, 100, 299, 100, 299, 100], max_new_tokens=1))
    item = job([100, 299, 100, 101, 299, 100, 101, 299, 100], max_new_tokens=20)
    seen = []
    propose = generator._speculation.drafter.propose
    generator._speculation.drafter.propose = lambda *a: seen.append(propose(*a)) or seen[-1]
    run(generator, item)
    assert seen[0] == [[101]]


# How far


def test_dynamic_length() -> None:
    length = DraftLength(DraftOptions(6, dynamic=True))
    assert length.next() == 6
    length.update(6, 6)
    assert length.ema == 7 and length.next() == 6
    length.update(6, 2)
    assert length.ema == pytest.approx(0.65 * 2 + 0.35 * 7) and length.next() == 4
    length.update(4, 4)
    assert length.ema == pytest.approx(1.3 * 5 - 0.3 * 3.75) and length.next() == 6
    while length.ema >= 0.3:
        assert length.next() >= 1
        length.update(3, 0)
    assert [length.next() for _ in range(34)] == ([0] * 15 + [2]) * 2 + [0] * 2
    assert [length.next(ready=False) for _ in range(20)] == [0] * 20
    assert [length.next() for _ in range(3)] == [2, 0, 0]
    length.update(2, 2)
    assert length.next() == 4
    assert DraftLength(DraftOptions(1, dynamic=True)).next() == 1
    fixed = DraftLength(DraftOptions(5))
    for _ in range(9):
        fixed.update(5, 0)
        assert fixed.next() == 5
    eager = DraftLength(DraftOptions(5, dynamic=True, skip_ema=0))
    for _ in range(9):
        eager.update(5, 0)
    assert eager.next() == 1


def test_the_longest_wish_counts_for_all(make) -> None:
    model = FakeModel(letters=LETTERS)
    arguments = drafting(model, 4, "model", num_draft_tokens=6)
    generator = make(4, model, dynamic_draft_tokens=True, record_draft_stats=True, **arguments)
    pair = [job(prompt(20, i), max_new_tokens=30) for i in range(2)]
    generator.enqueue(pair)
    for item, ema in zip(pair, (0.0, 2.5), strict=True):
        item.draft_length.ema = ema
    while not pair[1].draft_stats:
        generator.iterate()
    assert [item.draft_stats[0][1] for item in pair] == [3, 3]
    generator.clear_queue()
    lone = job(prompt(20), max_new_tokens=30)
    generator.enqueue(lone)
    lone.draft_length.ema = 0.0
    for _ in range(10):
        generator.iterate()
    assert not lone.draft_stats and lone.new_tokens > 5


def test_share() -> None:
    assert share([4, 1, 4], [1, 1, 1], 7) == [3, 1, 3]
    assert share([4, 1, 4], [1, 1, 1], 6) == [3, 1, 2]
    assert share([4, 0, 4], [1, 1, 1], 1) == [1, 0, 0]
    assert share([2, 2], [1, 1], 99) == [2, 2] and share([], [], 3) == []
    assert share([4, 4], [2, 1], 7) == [2, 3]


@pytest.mark.parametrize("count", [1, 4, 11, 15, 16, 17])
def test_a_pass_keeps_to_its_rows(make, count: int) -> None:
    model = FakeModel(letters=LETTERS)
    generator = make(40, model, **drafting(model, 40, "model", num_draft_tokens=5))
    jobs = {job(prompt(20, i), max_new_tokens=12): prompt(20, i) for i in range(count)}
    events = run(generator, *jobs)
    rows = [bsz for bsz, width in model.forwards if width == 1]
    assert max(rows) == (min(MAX_ROWS, 6 * count) if count < MAX_ROWS else count)
    for item, ids in jobs.items():
        expect_alone(generator, item, events[item], ids, 12)
        assert events[item][-1]["rejected_draft_tokens"] == 0


# That nothing changes


@pytest.mark.parametrize("length", [1, 2, 200, 250, 254, 255, 256, 257, 511, 512])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_greedy_is_unchanged(make, length: int, kind: str) -> None:
    model = FakeModel(letters=b"ab", spread=3.0)
    generator = make(4, model, **drafting(model, 4, kind, num_draft_tokens=3))
    ids = prompt(length)
    item = job(ids, max_new_tokens=60)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, ids, 60)
    steps = sum(width == 1 for _, width in model.forwards) - (length in (2, 258))
    last = events[-1]
    drafted = last["accepted_draft_tokens"] + last["rejected_draft_tokens"]
    assert last["accepted_draft_tokens"] == item.accepted_draft_tokens == 60 - steps
    if kind == "model":
        assert steps == 15 and drafted == 45


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 9])
def test_limits_inside_a_draft(make, room: int) -> None:
    """The last token, a full cache and the end of a window come in the middle of a draft."""
    model = FakeModel(letters=LETTERS)
    generator = make(2, model, **drafting(model, 2, "model", num_draft_tokens=4))
    item = job(prompt(512 - room + 1), max_new_tokens=room)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, prompt(512 - room + 1), room)
    item = job(prompt(512 - room + 1), max_new_tokens=None)
    events = run(generator, item)[item]
    assert events[-1]["cache_full"] and len(tokens(events)) == room
    item = job(prompt(256 - room + 1), max_new_tokens=2 * room, max_rq_tokens=1)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, prompt(256 - room + 1), 2 * room)
    assert [i for i, e in enumerate(tok for tok in events if "token_ids" in tok) if "requeue" in e]


def test_draft_cache_follows_the_pages(make) -> None:
    """A draft model that is always right is so on shared, copied and adopted pages too."""
    model = FakeModel(letters=LETTERS)
    arguments = drafting(model, 16, "model", num_draft_tokens=3)
    generator = make(16, model, max_chunk_size=256, **arguments)
    first = job(prompt(300), max_new_tokens=230)
    events = run(generator, first)[first]
    whole = first.sequences[0].input_ids.torch()[0].tolist()
    for ids in (whole, whole[:400], [*whole[:520], 101], [*whole[:256], 101, 102]):
        for _ in range(2):
            item = job(ids)
            events = run(generator, item)[item]
            assert events[-1]["rejected_draft_tokens"] == 0 < events[-1]["cached_tokens"]
    running = job(prompt(40), max_new_tokens=100)  # others copy from it while it runs
    generator.enqueue(running)
    for step in range(20):
        generator.iterate()
        other = job([*running.sequences[0].input_ids.torch()[0].tolist(), 100 + step % 3])
        generator.enqueue(other)
        while not other.is_finished:
            generator.iterate()
        assert other.rejected_draft_tokens == running.rejected_draft_tokens == 0
    together = [job(prompt(900, 3)) for _ in range(3)]
    for item, events in run(generator, *together).items():
        assert item.rejected_draft_tokens == 0
        expect_alone(generator, item, events, prompt(900, 3), 10)


def test_banned_string_inside_a_draft(make) -> None:
    model = FakeModel(letters=b"abc")
    plain = make(4)
    generator = make(4, model, **drafting(model, 4, "model", num_draft_tokens=6))
    plain = make(4, FakeModel(letters=b"abc"))
    for banned in (["ab"], ["ca", "bb"], ["abc", "a"]):
        pair = [job(prompt(250), max_new_tokens=40, banned_strings=banned) for _ in range(2)]
        want, got = run(plain, pair[0])[pair[0]], run(generator, pair[1])[pair[1]]
        assert tokens(got) == tokens(want) and text(got) == text(want)
        suppressed = [e["suppressed_tokens"].tolist() for e in want if "suppressed_tokens" in e]
        assert suppressed == [
            e["suppressed_tokens"].tolist() for e in got if "suppressed_tokens" in e
        ]
        assert suppressed and pair[1].accepted_draft_tokens


def test_forced_tokens(make) -> None:
    model = FakeModel(letters=b"abc")
    generator = make(4, model, **drafting(model, 4, "model"))
    item = job(prompt(20), max_new_tokens=20)
    generator.enqueue(item)
    while item.new_tokens < 5:
        generator.iterate()
    at = item.new_tokens
    item.constrain_output_now(torch.tensor([[110, 111, 112]]))
    while generator.num_remaining_jobs():
        generator.iterate()
    ids = item.sequences[0].input_ids.torch()[0, 20:].tolist()
    assert ids[at : at + 3] == [110, 111, 112] and len(ids) == 20


def test_sampled_tokens_are_distributed_alike(make) -> None:
    """Chi-square against the model's own probabilities: of two tokens, the second of which is drawn
    behind a drafted one if the first was as drafted."""
    model = FakeModel(letters=b"ab \n", spread=3.0)
    generator = make(16, model, max_batch_size=8, **drafting(model, 16, "model"))
    count, ids = 4000, prompt(5)
    jobs = [
        job(ids, max_new_tokens=2, sampler=CategoricalSampler(), seed=None) for _ in range(count)
    ]
    run(generator, *jobs, check=False)
    assert sum(item.accepted_draft_tokens for item in jobs) > count // 20
    pairs: dict[tuple[int, ...], int] = {}
    for item in jobs:
        pair = tuple(item.sequences[0].input_ids.torch()[0, 5:].tolist())
        pairs[pair] = pairs.get(pair, 0) + 1
    width = model.tokenizer.actual_vocab_size

    def probabilities(context: list[int]) -> torch.Tensor:
        return torch.from_numpy(model.reference_logits(context))[:width].double().softmax(0)

    statistic, cells, rest = 0.0, 0, 0.0
    first = probabilities(ids)
    for a in torch.nonzero(first > 1e-4).flatten().tolist():
        second = probabilities([*ids, a])
        for b in torch.nonzero(second > 1e-4).flatten().tolist():
            expected = count * float(first[a] * second[b])
            if expected < 8:
                continue
            statistic += (pairs.get((a, b), 0) - expected) ** 2 / expected
            cells, rest = cells + 1, rest + expected
    assert cells > 15 and rest > 0.7 * count
    assert statistic < cells + 5 * (2 * cells) ** 0.5


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_a_seed_repeats_with_and_without(make, kind: str) -> None:
    model = FakeModel(letters=b"ab", spread=3.0)
    generator = make(8, model, **drafting(model, 8, kind, wrong_percent=20))
    jobs = {}
    for i in range(5):
        item = job(prompt(100 * i + 7), max_new_tokens=40, sampler=DefaultSampler(), seed=i)
        jobs[item] = prompt(100 * i + 7), i
    events = run(generator, *jobs)
    for item, (ids, seed) in jobs.items():
        expect_alone(generator, item, events[item], ids, 40, DefaultSampler(), seed=seed)
    assert sum(item.accepted_draft_tokens for item in jobs) > 0


# Cost, figures, arguments


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_useless_drafts_cost_nothing_once_skipped(make, kind: str) -> None:
    model = FakeModel(letters=bytes(range(97, 123)))
    arguments = drafting(model, 4, kind, wrong_percent=100, num_draft_tokens=4)
    generator = make(4, model, dynamic_draft_tokens=True, **arguments)
    item = job(prompt(20), max_new_tokens=400)
    events = run(generator, item)[item]
    expect_alone(generator, item, events, prompt(20), 400)
    rows = sum(bsz for bsz, width in model.forwards if width == 1)
    assert rows < 400 * 1.25  # a probe of two every 16 rounds
    if kind == "model":
        assert item.accepted_draft_tokens == 0
        steps = [bsz for bsz, width in arguments["draft_model"].forwards if width == 1]
        assert len(steps) < 400 * 0.15


def test_recorded_figures(make) -> None:
    model = FakeModel(letters=LETTERS)
    arguments = drafting(model, 4, "model", wrong_percent=30, num_draft_tokens=3)
    generator = make(4, model, record_draft_stats=True, **arguments)
    item = job(prompt(20), max_new_tokens=50)
    run(generator, item)
    assert sum(accepted for _, _, accepted, _ in item.draft_stats) == item.accepted_draft_tokens
    assert sum(w - a for _, w, a, _ in item.draft_stats) == item.rejected_draft_tokens
    places = [position for position, *_ in item.draft_stats]
    assert places == sorted(set(places)) and places[0] == 20
    quiet = job(prompt(20))
    other = make(4, model, **drafting(model, 4, "model"))
    run(other, quiet)
    assert quiet.draft_stats == [] and quiet.draft_state is None and other.num_draft_tokens == 4
    plain = make(4, model)
    last = run(plain, item := job(prompt(20)))[item][-1]
    assert "accepted_draft_tokens" not in last and plain.num_draft_tokens == 0


def test_a_text_that_the_draft_model_cannot_read(make) -> None:
    """It goes on undrafted, beside one that is drafted; its pages serve both."""
    model = FakeModel(letters=b"ab")
    model.tokenizer.actual_vocab_size = 250
    arguments = drafting(model, 16, "model", vocab=250)
    model.tokenizer.actual_vocab_size = 268
    arguments["draft_model"].config.directory = None
    with pytest.raises(ConfigError, match="250 tokens, the tokenizer 268"):
        make(16, model, **arguments)
    model.tokenizer.actual_vocab_size = 250
    generator = make(16, model, **arguments)
    strange = [*prompt(300), 255, *prompt(40)]
    items = {job(strange, max_new_tokens=300): strange, job(prompt(300)): prompt(300)}
    events = run(generator, *items)
    (odd, plain) = items
    assert odd.accepted_draft_tokens == odd.rejected_draft_tokens == 0 < plain.accepted_draft_tokens
    again = [job([*strange[:600], 100, 101]), job(prompt(305))]
    run(generator, *again)
    assert again[0].cached_tokens > 300 and again[1].rejected_draft_tokens == 0
    assert len(tokens(events[odd])) == 300


def test_argument_errors(make) -> None:
    model = FakeModel()
    draft = FakeDraft(model)
    cache = FakeCache(draft, 2048)

    def fails(error=ConfigError, match="", **arguments) -> None:
        with pytest.raises(error, match=match):
            make(8, model, **arguments)

    fails(match="both or neither", draft_model=draft)
    fails(match="both or neither", draft_cache=cache)
    fails(match="excludes", draft_model=draft, draft_cache=cache, ngram_match_min=2)
    fails(match="2048 tokens|1024 tokens", draft_model=draft, draft_cache=FakeCache(draft, 1024))
    fails(match="another model", draft_model=draft, draft_cache=FakeCache(model, 2048))
    fails(match="num_draft_tokens", ngram_match_min=2, num_draft_tokens=0)
    fails(match="num_draft_tokens", ngram_match_min=2, num_draft_tokens=2.5)
    fails(match="ngram_match_min", ngram_match_min=-1)
    fails(match="ngram_match_min", ngram_match_min=1.5)
    fails(match="alpha_up", ngram_match_min=2, dynamic_draft_alpha_up=2.5)
    fails(match="probe_interval", ngram_match_min=2, dynamic_draft_probe_interval=0)
    fails(match="skip_ema", ngram_match_min=2, dynamic_draft_skip_ema=float("nan"))
    own = FakeCache(model, 2048)
    with pytest.raises(ConfigError, match="main cache"):
        Generator(model, own, model.tokenizer, draft_model=model, draft_cache=own)
    for cap in ("recurrent_states", "mtp_draft", "dflash_draft"):
        draft.caps = {cap: True}
        fails(UnsupportedError, cap, draft_model=draft, draft_cache=cache)
    draft.caps, draft.loaded = {}, False
    fails(match="not loaded", draft_model=draft, draft_cache=cache)


def test_capabilities_of_a_drafter(make) -> None:
    model = FakeModel()
    draft = FakeDraft(model)
    bound = []
    draft.caps = {"default_draft_size": 7, "attach_target": True}
    draft.attach_target = bound.append
    cache = FakeCache(draft, 2048)
    assert make(8, model, draft_model=draft, draft_cache=cache).num_draft_tokens == 7
    assert bound == [model]
    old = make(8, model, draft_model=draft, draft_cache=cache, num_draft_tokens=3)
    assert old.num_draft_tokens == 3
    with pytest.raises(ConfigError, match="newer Generator"):
        make(8, model, draft_model=draft, draft_cache=cache) and old.iterate()


def test_vocabularies_are_compared(make, tmp_path) -> None:
    def directory(name: str, vocab) -> str:
        (tmp_path / name).mkdir()
        stored = {"model": {"vocab": vocab}, "added_tokens": [{"content": name}]}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(stored))
        return str(tmp_path / name)

    def attempt(own: str, other: str) -> Generator:
        model = FakeModel()
        draft = FakeDraft(model)
        model.config = SimpleNamespace(**vars(model.config), directory=own)
        draft.config = SimpleNamespace(**vars(draft.config), directory=other)
        return make(8, model, draft_model=draft, draft_cache=FakeCache(draft, 2048))

    base = directory("base", {"a": 0, "b": 1, "c": 2})
    attempt(base, directory("tuned", {"a": 0, "b": 1, "c": 2}))
    attempt(base, directory("smaller", [["a", 0.1], ["b", 0.2]]))
    with pytest.raises(ConfigError, match="1 ids have another text, the first is 1: 'b' here, 'x'"):
        attempt(base, directory("other", {"a": 0, "x": 1}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        attempt(base, directory("broken", None))


def test_samplers_of_a_batch_may_differ(make) -> None:
    model = FakeModel(letters=LETTERS)
    generator = make(8, model, **drafting(model, 8, "model", wrong_percent=25))
    greedy, drawn = job(prompt(30), max_new_tokens=30), None
    drawn = job(prompt(30), max_new_tokens=30, sampler=DefaultSampler(), seed=3)
    events = run(generator, greedy, drawn)
    expect_alone(generator, greedy, events[greedy], prompt(30), 30, ArgmaxSampler())
    expect_alone(generator, drawn, events[drawn], prompt(30), 30, DefaultSampler(), seed=3)
