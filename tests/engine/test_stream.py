"""Released text, stops, banned strings and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exl3.errors import CacheFullError
from exl3.generator.automaton import fold
from exl3.generator.sampler import CustomSampler, SS_AdaptiveP, SS_Mirostat
from exl3.generator.stops import LoopDetector
from tests.engine.fake import FakeModel
from tests.engine.test_generator import job, prompt, run, text, tokens


class Scripted(FakeModel):
    """Says the given ids after the prompt, whatever it is; `avoid` marks second choices."""

    def __init__(self, script: list[int], start: int) -> None:
        super().__init__()
        self.script, self.start = script, start

    def _run(self, input_ids, params, want):
        out = super()._run(input_ids, params, want)
        if want:
            for row in range(out.shape[0]):
                at = int(params["cache_seqlens"][row]) + 1 - self.start
                if at < len(self.script):
                    out[row, -1, self.script[at]] = 50.0
        return out


def say(make, script, **kwargs):
    """Events, with ids given as bytes or ids."""
    ids = [3 + item[0] if isinstance(item, bytes) else item for item in script]
    generator = make(4, model=Scripted(ids, 5))
    kwargs.setdefault("max_new_tokens", len(ids))
    item = job(prompt(5), **kwargs)
    return [e for e in run(generator, item)[item] if e["stage"] == "streaming"]


def letters(string: str) -> list[bytes]:
    return [bytes([b]) for b in string.encode()]


def test_characters_are_never_split(make) -> None:
    said = "aé€😀é!"
    events = say(make, letters(said))
    assert text(events) == events[-1]["full_completion"] == said
    assert all("\ufffd" not in e.get("text", "") for e in events)
    assert [e.get("text") for e in events[:3]] == ["a", None, "é"]
    assert events[2]["token_ids"].shape == (1, 2)


def test_tokens_that_join_characters(make) -> None:
    tokenizer = FakeModel().tokenizer
    first = tokenizer.bytes.index(b"\xc3", 259)
    middle = tokenizer.bytes.index(b"\xa9\xe2\x82")
    last = tokenizer.bytes.index(b"\xac!")
    events = say(make, [first, middle, last, b"a"])
    assert text(events) == "é€!a"
    assert [e.get("text") for e in events] == [None, None, "é€!", "a"]


@pytest.mark.parametrize("broken", [[b"\xff", b"a"], [b"\xc3", b"a"], [b"a", b"\xe2", b"\x82"]])
def test_bytes_that_never_complete(make, broken) -> None:
    events = say(make, broken)
    assert text(events) == b"".join(broken).decode("utf-8", "replace")
    assert len(tokens(events)) == len(broken)


def test_a_stop_string_spans_tokens(make) -> None:
    events = say(make, letters("ab foo barx"), stop_conditions="oo b")
    last = events[-1]
    assert last["eos_reason"] == "stop_string" and last["eos_triggering_string"] == "oo b"
    assert text(events) == last["full_completion"] == "ab f"
    assert last["held"] == {"text": "oo b"}
    assert len(tokens(events)) == len("ab foo b") == last["new_tokens"]


def test_a_partial_match_that_fails_is_released(make) -> None:
    events = say(make, letters("ab foo bax"), stop_conditions=["oo bar", ""])
    assert text(events) == "ab foo bax" and events[-1]["eos_reason"] == "max_new_tokens"
    assert [e.get("text") for e in events][4:] == [None] * 5 + ["oo bax"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_earliest_complete_match_wins(make, order: int) -> None:
    pieces = FakeModel().tokenizer.bytes
    both = pieces.index(b"foo bar")
    for stops, found, left in [
        (["bar", "oo"], "oo", "xf"),
        (["foo", "foo bar"], "foo bar", "x"),
        (["bar!", "oo"], "oo", "xf"),
    ]:
        events = say(make, [b"x", both, b"y"], stop_conditions=stops[::order])
        assert events[-1]["eos_triggering_string"] == found
        assert text(events) == left


def test_stop_token_releases_what_was_held(make) -> None:
    events = say(
        make,
        [*letters("ab sto"), 1],
        stop_conditions=["stop!", np.int64(1), None],
        max_new_tokens=9,
    )
    last = events[-1]
    assert last["eos_reason"] == "stop_token" and last["eos_triggering_token_id"] == 1
    assert last["eos_triggering_token_str"] == "</s>"
    assert text(events) == last["full_completion"] == "ab sto"
    assert last["held"]["text"] == "</s>" and last["held"]["token_ids"].tolist() == [[1]]
    assert len(tokens(events)) == 6 and last["new_tokens"] == 7


def test_a_special_token_as_stop_string_stops_on_its_id(make) -> None:
    events = say(make, [b"a", 2, b"b"], stop_conditions="<|im_end|>")
    assert events[-1]["eos_reason"] == "stop_token" and text(events) == "a"


def test_a_special_token_spelt_out_stops_as_text(make) -> None:
    events = say(make, letters("a<|im_end|>b"), stop_conditions=["<|im_end|>"])
    assert events[-1]["eos_reason"] == "stop_string" and text(events) == "a"


def test_bare_strings_in_place_of_lists(make) -> None:
    """Not their letters, one by one."""
    events = say(make, letters("oof foo bar"), banned_strings="foo", max_new_tokens=20)
    assert text(events).startswith("oof ") and "foo" not in text(events)
    events = say(make, letters("oof foo bar"), stop_conditions="foo")
    assert text(events) == "oof "


@pytest.mark.parametrize("show", [False, True])
def test_special_tokens_in_text(make, show: bool) -> None:
    events = say(make, [b"a", 2, b"b"], decode_special_tokens=show)
    assert text(events) == ("a<|im_end|>b" if show else "ab")
    assert len(tokens(events)) == 3


def test_min_new_tokens_masks_stop_tokens(make) -> None:
    events = say(make, [1, 1, 1, 1], stop_conditions=1, min_new_tokens=2, max_new_tokens=9)
    assert events[-1]["eos_reason"] == "stop_token" and events[-1]["new_tokens"] == 3
    assert 1 not in tokens(events)


def test_limit_releases_what_is_held(make) -> None:
    events = say(make, letters("ab sto"), stop_conditions="stop")
    assert text(events) == "ab sto" and events[-1]["eos_reason"] == "max_new_tokens"
    assert "held" not in events[-1]


@pytest.mark.parametrize("banned", ["FOO", "o b", "x f"])
def test_banned_strings_never_appear(make, banned: str) -> None:
    events = say(make, letters("ab x foo bar end"), banned_strings=[banned, ""], max_new_tokens=30)
    assert fold(banned) not in fold(events[-1]["full_completion"])
    cut = [e for e in events if "suppressed_text" in e]
    assert cut and cut[0]["suppressed_text"].lower() == fold(banned)
    assert cut[0]["suppressed_tokens"].shape == (1, len(banned))
    assert text(events) == events[-1]["full_completion"]
    assert events[-1]["new_tokens"] == len(tokens(events)) == 30


@pytest.mark.parametrize("final", [SS_Mirostat(3.0, 0.5), SS_AdaptiveP(0.5, 0.9)])
def test_a_cut_takes_back_what_the_sampler_remembers(make, final) -> None:
    script = [3 + b[0] for b in letters("ab x foo bar end")]
    generator = make(4, model=Scripted(script, 5))
    item = job(prompt(5), banned_strings=["foo"], max_new_tokens=30, sampler=CustomSampler([final]))
    generator.enqueue(item)
    remembered, cuts = {5: item.sampler.memory()}, 0
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            length = len(item.sequence)
            if "suppressed_tokens" in event:
                cuts += 1
                assert item.sampler.memory() == remembered[length]
            elif event["stage"] == "streaming":
                remembered[length] = item.sampler.memory()
    assert cuts and len(set(remembered.values())) > 2


def test_banned_string_at_the_last_token(make) -> None:
    events = say(make, letters("ab foo"), banned_strings=["foo"])
    assert "foo" not in text(events) and len(tokens(events)) == 6


def test_a_banned_string_before_an_open_character_at_the_limit(make) -> None:
    pieces = FakeModel().tokenizer.bytes
    first, middle = pieces.index(b"\xc3", 259), pieces.index(b"\xa9\xe2\x82")
    events = say(make, [first, middle], banned_strings=["\u00e9"])
    assert "\u00e9" not in text(events) and len(tokens(events)) == 2


def test_banned_strings_across_a_page_end_and_a_requeue(make) -> None:
    said = letters("x" * 245 + "bad bad word")
    for step in (None, 1):
        events = say(make, said, banned_strings=["bad word"], max_rq_tokens=step)
        assert events[-1]["full_completion"][:249] == "x" * 245 + "bad "
        assert "bad word" not in events[-1]["full_completion"]
        assert events[-1]["new_tokens"] == len(tokens(events)) == len(said)


def test_all_continuations_banned_ends_the_job(make) -> None:
    every = [bytes([b]).decode("latin1") for b in range(128)]
    events = say(make, letters("abc"), banned_strings=[*every, "\ufffd", "\xe9"])
    assert events[-1]["eos_reason"] in ("end_filter", "max_new_tokens")


@pytest.mark.parametrize("rq", [None, 10])
def test_loop(make, rq) -> None:
    said = letters("start" + "abc" * 200)
    events = say(make, said, stop_on_loop=(30, 3), max_rq_tokens=rq)
    assert events[-1]["eos_reason"] == "loop_detected"
    assert events[-1]["new_tokens"] == 5 + 30 and len(tokens(events)) == 35


def test_token_healing(make) -> None:
    generator = make(model=FakeModel(letters=b"abc the"))
    ids = [*prompt(20), 3 + ord(" ")]
    item = job(ids, token_healing=True, max_new_tokens=6)
    events = run(generator, item)[item]
    pieces = generator.tokenizer.bytes
    drawn = tokens(events)
    assert pieces[drawn[0]].startswith(b" ")
    whole = b"".join(pieces[i] for i in drawn).decode()
    assert text(events) == whole[1:] == events[-1]["full_completion"]
    assert events[-1]["prompt_tokens"] == 21 and events[-1]["new_tokens"] == 6


def test_a_job_that_was_refused_heals_one_token_only(make) -> None:
    generator = make(model=FakeModel(letters=b"abc the"))
    ids = [*prompt(250), 3 + ord(" ")]
    item = job(ids, token_healing=True, max_new_tokens=8)
    with pytest.raises(CacheFullError):
        make(1).enqueue(item)
    events = run(generator, item)[item]
    said = item.sequence.input_ids.numpy().tolist()
    assert said == ids[:-1] + tokens(events) and events[-1]["new_tokens"] == 8


@pytest.mark.parametrize(("window", "reps"), [(8, 2), (9, 4), (3, 2), (20, 3)])
def test_loop_detector_is_exact(window: int, reps: int) -> None:
    rng = np.random.default_rng(window)
    for _ in range(200):
        detector = LoopDetector(window, reps)
        s: list[int] = []
        period = int(rng.integers(1, 5))
        for _ in range(40):
            repeat = s and rng.random() < 0.93
            s.append(s[-min(period, len(s))] if repeat else int(rng.integers(3)))
            last = s[-window:]
            want = len(s) >= window and any(
                all(last[i] == last[i - p] for i in range(p, window))
                for p in range(1, window // reps + 1)
            )
            assert detector.push(s[-1]) == want


def test_decode_of_the_whole_equals_the_stream(make) -> None:
    generator = make(8, model=FakeModel(letters=b"ab\xc3\xa9\xe2\x82\xac!"))
    jobs = [job(prompt(30 + i), max_new_tokens=200) for i in range(3)]
    events = run(generator, *jobs)
    for item in jobs:
        ids = torch.tensor(tokens(events[item]))
        assert text(events[item]) == generator.tokenizer.decode(ids)
