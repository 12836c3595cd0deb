"""Filters: masks, triggers, completion, rewinds, faults."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from exl3 import Cache, Config, Generator, Model, Tokenizer
from exl3.errors import ConfigError
from exl3.generator import Filter, FormatronFilter, LLGuidanceFilter
from exl3.generator.sampler import DefaultSampler
from tests.engine.fake import FakeModel
from tests.engine.test_generator import job, prompt, run, text, tokens
from tests.engine.test_real_model import DIRECTORY


class Spell(Filter):
    """Allows exactly the bytes of a word, one after another."""

    packed = False
    can_roll_back = False

    def __init__(self, tokenizer, word: str, **kwargs) -> None:
        self.word = [3 + b for b in word.encode()]
        self.at = 0
        super().__init__(tokenizer, **kwargs)

    def reset(self) -> None:
        self.at = 0

    def accept_token(self, token: int) -> None:
        assert token == self.word[self.at]
        self.at += 1

    def is_completed(self) -> bool:
        return self.at == len(self.word)

    def rollback_tokens(self, count: int) -> bool:
        self.at -= count * self.can_roll_back
        return self.can_roll_back

    def get_next_logit_mask(self):
        token = self.word[self.at]
        if self.packed:
            mask = torch.zeros(1, 9, dtype=torch.int32)
            mask[0, token >> 5] = 1 << (token & 31) if token & 31 < 31 else -(1 << 31)
            return mask
        mask = torch.full((1, 200), -torch.inf, dtype=self.logits_dtype)
        mask[0, token] = 0
        return mask


class Packed(Spell):
    packed = True


class RollsBack(Spell):
    can_roll_back = True


@pytest.mark.parametrize("kind", [Spell, Packed])
@pytest.mark.parametrize("rq", [None, 1])
def test_a_filter_ends_the_job(make, kind, rq) -> None:
    generator = make()
    word = "xyz~" * 80
    filters = [kind(generator.tokenizer, word, eos_after_completed=True)]
    item = job(prompt(20), filters=filters, max_new_tokens=400, max_rq_tokens=rq)
    other = job(prompt(30))
    events = run(generator, item, other)
    assert events[item][-1]["eos_reason"] == "end_filter" and text(events[item]) == word
    assert events[other][-1]["eos_reason"] == "max_new_tokens"


def test_trigger_and_going_inactive(make) -> None:
    generator = make()
    trigger = 3 + ord("a")
    filters = [Spell(generator.tokenizer, "XY", trigger_token=trigger)]
    item = job(prompt(20), filters=filters, max_new_tokens=60, sampler=DefaultSampler(), seed=1)
    said = text(run(generator, item)[item])
    assert "a" in said[:-2].replace("ab", "")
    for i, char in enumerate(said[:-2]):
        single = char == "a" and tokens_at(item, generator)[i] == trigger
        assert not single or said[i + 1 : i + 3] == "XY"


def tokens_at(item, generator) -> dict[int, int]:
    """Token that starts at each place of the text."""
    out, place = {}, 0
    for token in item.sequences[0].input_ids.torch()[0, 20:].tolist():
        out[place] = token
        place += len(generator.tokenizer.bytes[token])
    return {i: out.get(i, -1) for i in range(place)}


def test_masks_are_intersected_and_an_empty_one_ends_the_job(make) -> None:
    generator = make()
    a, b = Spell(generator.tokenizer, "XY"), Packed(generator.tokenizer, "XZ")
    item = job(prompt(20), filters=[a, b])
    events = run(generator, item)[item]
    assert text(events) == "X"
    assert events[-1]["eos_reason"] == "end_filter" and "masked" in events[-1]["filter_error"]


@pytest.mark.parametrize("kind", [Spell, RollsBack])
def test_rewind_takes_filters_back(make, kind) -> None:
    generator = make()
    filter = kind(generator.tokenizer, "say foo!")
    item = job(prompt(20), filters=[filter], banned_strings=["foo"])
    events = run(generator, item)[item]
    assert text(events) == "say " and filter.at == 4
    assert events[-1]["eos_reason"] == "end_filter" and events[-1]["filter_error"]


def test_a_broken_filter_ends_only_its_job(make) -> None:
    class Broken(Spell):
        def get_next_logit_mask(self):
            raise ValueError("bad grammar state")

    generator = make()
    bad, good = job(prompt(20), filters=[Broken(generator.tokenizer, "a")]), job(prompt(30))
    events = run(generator, bad, good)
    assert events[bad][-1]["filter_error"] == "bad grammar state"
    assert len(tokens(events[good])) == 10


def test_one_filter_in_two_jobs(make) -> None:
    generator = make()
    filter = Spell(generator.tokenizer, "XY", eos_after_completed=True)
    first, second = job(prompt(20), filters=[filter]), job(prompt(20), filters=[filter])
    generator.enqueue(first)
    with pytest.raises(ConfigError, match="own filter"):
        generator.enqueue(second)
    while generator.num_remaining_jobs():
        generator.iterate()
    third = job(prompt(20), filters=[filter])
    assert text(run(generator, third)[third]) == "XY"


def test_missing_packages_and_arguments(make) -> None:
    tokenizer = make().tokenizer
    with pytest.raises(ValueError, match="exactly one"):
        LLGuidanceFilter(tokenizer)
    with pytest.raises(ValueError, match="exactly one"):
        LLGuidanceFilter(tokenizer, regex="a", json_schema={})
    with pytest.raises(ValueError, match="formatter_builder"):
        FormatronFilter(tokenizer)
    with pytest.raises(ValueError, match="formatron"):
        FormatronFilter(tokenizer, formatter_builder=object())


class Faulty(Spell):
    """Fails in one method after a few tokens."""

    method, after = "", 0

    def _maybe(self, name: str) -> None:
        if name == self.method and self.at >= self.after:
            raise KeyError(f"broken {name}")

    def get_next_logit_mask(self):
        self._maybe("get_next_logit_mask")
        return super().get_next_logit_mask()

    def accept_token(self, token: int) -> None:
        self._maybe("accept_token")
        super().accept_token(token)

    def is_completed(self) -> bool:
        self._maybe("is_completed")
        return super().is_completed()

    def rollback_tokens(self, count: int) -> bool:
        self._maybe("rollback_tokens")
        return False


@pytest.mark.parametrize(
    "method", ["get_next_logit_mask", "accept_token", "is_completed", "rollback_tokens"]
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_fault_anywhere_ends_only_its_job(make, method: str, after: int) -> None:
    generator = make()
    bad = Faulty(generator.tokenizer, "say foo!")
    bad.method, bad.after = method, after
    first = job(prompt(20), filters=[bad], banned_strings=["foo"])
    good = job(prompt(30))
    third = job(prompt(25), filters=[Spell(generator.tokenizer, "XY", eos_after_completed=True)])
    events = run(generator, first, good, third)
    assert f"broken {method}" in events[first][-1]["filter_error"]
    assert events[first][-1]["eos_reason"] == "end_filter"
    assert len(tokens(events[good])) == 10 and text(events[third]) == "XY"
    assert bad.job is None and generator.pagetable.num_free == 8


@pytest.mark.parametrize("mask", [None, [0, 1], torch.zeros(1, 9, dtype=torch.int64)])
def test_what_is_no_mask_allows_nothing(make, mask) -> None:
    class Wrong(Spell):
        def get_next_logit_mask(self):
            return mask

    generator = make()
    item = job(prompt(20), filters=[Wrong(generator.tokenizer, "a")])
    events = run(generator, item)[item]
    assert not tokens(events) and "the mask is" in events[-1]["filter_error"]


class Watched(Spell):
    """Notes where its masks are made; one may be slow."""

    background = True

    def __init__(self, *args, **kwargs) -> None:
        self.threads, self.begun = [], threading.Event()
        super().__init__(*args, **kwargs)

    def use_background_worker(self) -> bool:
        return self.background

    def get_next_logit_mask(self):
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        return super().get_next_logit_mask()


class Foreground(Watched):
    background = False


def test_masks_are_made_while_the_model_runs(make) -> None:
    model = FakeModel()
    generator = make(model=model)
    filter = Watched(generator.tokenizer, "XYZ", eos_after_completed=True)
    forward, overlapped = model.forward, []

    def waiting(*args):
        overlapped.append(filter.begun.wait(20))  # begun before the model is done
        filter.begun.clear()
        return forward(*args)

    model.forward = waiting
    item = job(prompt(5), filters=[filter])
    assert text(run(generator, item)[item]) == "XYZ"
    assert overlapped == [True] * 3
    assert all(name.startswith("exl3-mask") for name in filter.threads)
    assert len(filter.threads) == 3


def test_a_filter_may_ask_for_the_callers_thread(make) -> None:
    generator = make()
    filter = Foreground(generator.tokenizer, "XYZ", eos_after_completed=True)
    item = job(prompt(5), filters=[filter])
    assert text(run(generator, item)[item]) == "XYZ"
    assert set(filter.threads) == {threading.current_thread().name}


def test_forced_tokens_need_no_mask(make) -> None:
    generator = make()
    filter = Watched(generator.tokenizer, "XYZ", eos_after_completed=True)
    item = job(prompt(5), filters=[filter])
    item.constrain_output_now(torch.tensor([[3 + ord("X"), 3 + ord("Y")]]))
    assert text(run(generator, item)[item]) == "XYZ"


def test_the_healed_token_is_not_the_filters(make) -> None:
    """It is a piece of the prompt; the filter begins after it."""
    generator = make(model=FakeModel(letters=b"abc the"))
    filter = Spell(generator.tokenizer, "XY", eos_after_completed=True)
    item = job([*prompt(20), 3 + ord(" ")], token_healing=True, filters=[filter])
    events = run(generator, item)[item]
    assert events[-1]["eos_reason"] == "end_filter"
    assert text(events).endswith("XY")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"regex": "[a-c]{3,9}z"}, "[a-c]{3,9}z"),
        ({"lark_grammar": 'start: "x" /[0-9]+/ "y"'}, "x[0-9]+y"),
        ({"gbnf_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": {"enum": ["north", 5]}}, '"north"|5'),
        ({"json_schema": '{"enum": ["north", 5]}'}, '"north"|5'),
    ],
)
def test_grammars(grammar, pattern: str) -> None:
    pytest.importorskip("llguidance", reason="needs the guided extra")
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache = Cache(model, 1024)
    model.load()
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model, cache, tokenizer)
    constrained = LLGuidanceFilter(tokenizer, eos_after_completed=True, **grammar)
    ids = tokenizer.encode("Hello")[0].tolist()
    item = job(ids, filters=[constrained], max_new_tokens=200, sampler=DefaultSampler(), seed=2)
    plain = job(ids, max_new_tokens=5)
    events = run(generator, item, plain)
    assert events[item][-1]["eos_reason"] == "end_filter"
    assert re.fullmatch(pattern, text(events[item])), text(events[item])
    assert events[plain][-1]["new_tokens"] == 5
    for bad in ({"regex": "("}, {"lark_grammar": "start: nope"}, {"json_schema": "{"}):
        with pytest.raises(ValueError, match="LLGuidanceFilter"):
            LLGuidanceFilter(tokenizer, **bad)
