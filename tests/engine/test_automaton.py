"""Stop and banned strings against a search that tries every place."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exl3.generator.automaton import Automaton, Scan, automaton, fold
from exl3.generator.stream import Outcome, StreamRules, TextStream, Token


def best_match(text: str, stops, banned):
    """(start, string, banned) by trying every string at every place."""
    found = [
        (start, -len(string), not is_banned, string)
        for strings, is_banned, within in ((stops, False, text), (banned, True, fold(text)))
        for string in strings
        for start in range(len(text))
        if string and within.startswith(fold(string) if is_banned else string, start)
    ]
    if not found:
        return None
    start, _, not_banned, string = min(found)
    return start, fold(string) if not not_banned else string, not not_banned


def ends_open(text: str, strings) -> int | None:
    """Where the longest start of a string begins that is the end of the text."""
    counts = [
        count
        for string in strings
        for count in range(1, len(string))
        if text.endswith(string[:count])
    ]
    return len(text) - max(counts) if counts else None


words = st.text(alphabet="abAİσ", max_size=5)


@settings(deadline=None, max_examples=500)
@given(
    st.lists(words, max_size=4),
    st.lists(words, max_size=4),
    st.lists(st.text(alphabet="abAİσ ", max_size=3), max_size=12),
)
@example(["ab", "b"], ["AB"], ["a", "b"])
@example(["User"], ["use"], ["us", "er"])
def test_scan(stops, banned, pieces) -> None:
    scan, text = Scan(Automaton(stops, banned)), ""
    for piece in pieces:
        text += piece
        scan.feed(piece, text)
        first = scan.first
        got = None if first is None else (first.start, first.string, first.banned)
        assert got == best_match(text, stops, banned)
        folded = [fold(string) for string in banned]
        assert scan.open_at_end(text) == (ends_open(text, stops), ends_open(fold(text), folded))
    scan.reset(text[2:])
    again = Scan(scan.strings)
    again.feed(text[2:], text[2:])
    assert (scan.first, scan.open_at_end(text[2:])) == (again.first, again.open_at_end(text[2:]))


class Letters:
    """A decoder whose tokens are characters."""

    held = False

    def push(self, token: int) -> str:
        return VOCABULARY[token]

    def flush(self) -> str:
        return ""


VOCABULARY = ["a", "b", "A", " ", "ab", "ba b", "aab", "B"]


def feed(stops, banned, tokens) -> tuple[str, str | None, list[Outcome]]:
    """Stream the tokens; after a cut the next ones simply come."""
    rules = StreamRules(frozenset(), Automaton(stops, banned))
    stream, outcomes = TextStream(rules, Letters, str), []
    for token in tokens:
        outcomes.append(stream.push(Token(token), limit=False, filter_done=False))
        if outcomes[-1].reason:
            return stream.full_completion(), outcomes[-1].reason, outcomes
    outcomes.append(stream.finish("max_new_tokens"))
    return stream.full_completion(), None, outcomes


strings = st.lists(st.text(alphabet="abA ", min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=500)
@given(strings, strings, st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=20))
def test_what_is_released(stops, banned, tokens) -> None:
    """No banned string, no stop string, nothing lost, nothing said twice."""
    said, reason, outcomes = feed(stops, banned, tokens)
    assert not any(fold(string) in fold(said) for string in banned)
    assert reason in (None, "stop_string")
    ids = [t.id for o in outcomes for t in o.released]
    cut = sum(len(o.suppressed) for o in outcomes if o.suppressed)
    taken = len(outcomes) - (reason is None)
    assert len(ids) + cut == taken
    text = "".join(VOCABULARY[i] for i in ids)
    if reason is None:
        assert said == text
        if not banned:
            assert not any(string in said for string in stops)
        return
    last = outcomes[-1]
    assert text == said + last.held_text
    assert last.held_text.startswith(last.details["eos_triggering_string"])
    assert not any(string in said for string in stops)


@pytest.mark.parametrize(
    ("stops", "banned", "tokens", "said", "reason"),
    [
        (["a"], ["b"], ["ab"], "", "stop_string"),  # one token; the stop string is earlier
        (["b"], ["a"], ["ab", "b"], "", "stop_string"),  # the banned one is; then b comes
        (["ab"], ["AB"], ["ab", "a"], "a", None),  # the same place and length: banned
        (["ab"], ["a"], ["ab", "b"], "", "stop_string"),  # the same place: the longer one
        (["b"], ["b "], ["ab"], "a", "stop_string"),  # what may begin there cannot be earlier
        (["a "], ["aaa"], ["aab", " "], "aab ", None),  # a start that came to nothing
    ],
)
def test_stop_against_banned(stops, banned, tokens, said: str, reason) -> None:
    got = feed(stops, banned, [VOCABULARY.index(token) for token in tokens])
    assert got[:2] == (said, reason)


def test_a_banned_string_that_began_earlier_is_waited_for() -> None:
    tokens = [VOCABULARY.index(token) for token in ("ab", "a", "b")]
    for after, reason in (([0, 1], None), ([0, 2], "stop_string")):
        said, got, outcomes = feed(["b"], ["aba"], [tokens[i] for i in after])
        assert not outcomes[0].released and outcomes[0].reason is None
        assert (said, got) == (("", None) if reason is None else ("a", reason))


def test_jobs_share_an_automaton() -> None:
    one = automaton(frozenset(["a"]), frozenset(["b"]))
    assert automaton(frozenset(["a"]), frozenset(["b"])) is one
    assert not Automaton([], [""]) and Automaton([""], ["x"])
    assert Automaton(["ab", "abc"], []).longest_stop == 3
    assert fold("İΣAß") == "İσaß"


def test_a_long_text_is_read_once() -> None:
    """A stop string of which the text has all but the end, thousands of times over."""
    count = 3000
    calls = 0

    class Counting(Automaton):
        def _step(self, node: int, char: str) -> int:
            nonlocal calls
            calls += 1
            return super()._step(node, char)

    strings = Counting(["a" * count + "b"], ["a" * count + "c"])
    calls = 0
    scan, text = Scan(strings), ""
    for _ in range(count):
        text += "a"
        scan.feed("a", text)
    assert calls == count and scan.first is None
