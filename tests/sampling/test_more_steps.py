"""The steps beyond the interface page: definitions, neutral values, ends of ranges, masks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3.errors import ConfigError
from exl3.generator.sampler import (
    SS_DRY,
    ComboSampler,
    CustomSampler,
    MoreSteps,
    NothingToSampleError,
    SS_AllowTokens,
    SS_Argmax,
    SS_BanEOS,
    SS_Base,
    SS_DynaTemp,
    SS_MinP,
    SS_Mirostat,
    SS_Sample,
    SS_Smoothing,
    SS_Temperature,
    SS_TopA,
    SS_TopK,
    SS_TopNSigma,
    SS_TypicalP,
)
from exl3.sampling.dry import _common_starts
from tests.sampling import more_reference as ref
from tests.sampling.test_steps import VOCAB, distribution, make_logits


def close(got, want) -> None:
    want = np.asarray(want)
    likely = want > 1e-15 * want.max()  # what is far less likely is never drawn, and left out
    np.testing.assert_array_equal(got[likely] > 0, True)
    assert (got[want == 0] == 0).all()
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (SS_TypicalP(0.9), lambda x, p: ref.typical_p(p, 0.9)),
        (SS_TypicalP(0.2), lambda x, p: ref.typical_p(p, 0.2)),
        (SS_TypicalP(0.0), lambda x, p: ref.typical_p(p, 0.0)),
        (SS_TypicalP(0.9999), lambda x, p: ref.typical_p(p, 0.9999)),
        (SS_TopA(0.3), lambda x, p: ref.top_a(p, 0.3)),
        (SS_TopA(1.0), lambda x, p: ref.top_a(p, 1.0)),
        (SS_TopNSigma(1.0), lambda x, p: ref.top_n_sigma(x, 1.0)),
        (SS_TopNSigma(0.01), lambda x, p: ref.top_n_sigma(x, 0.01)),
        (SS_DynaTemp(0.5, 1.8), lambda x, p: ref.dyna_temp(p, 0.5, 1.8, 1.0)),
        (SS_DynaTemp(0.0, 3.0, 0.5), lambda x, p: ref.dyna_temp(p, 0.0, 3.0, 0.5)),
        (SS_DynaTemp(0.7, 0.7), lambda x, p: ref.dyna_temp(p, 0.7, 0.7, 1.0)),
        (SS_Smoothing(0.3), lambda x, p: ref.smoothing(x, 0.3, 1.0)),
        (SS_Smoothing(0.2, 3.0), lambda x, p: ref.smoothing(x, 0.2, 3.0)),
        (SS_Smoothing(2.0, 1.7), lambda x, p: ref.smoothing(x, 2.0, 1.7)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_step(step: SS_Base, rule, seed: int, masked: bool) -> None:
    logits = make_logits(seed)
    if masked:
        logits[..., ::3] = -math.inf
    close(distribution([step], logits), rule(logits, ref.softmax(logits)))


def test_survivors_are_renormalised() -> None:
    logits = make_logits(3, 1.5)
    p = ref.softmax(logits)
    p = ref.keep(p, p >= p.topk(40).values[-1])
    want = ref.dyna_temp(ref.top_a(ref.typical_p(p, 0.8), 0.1), 0.5, 1.5, 1.0)
    close(
        distribution([SS_TopK(40), SS_TypicalP(0.8), SS_TopA(0.1), SS_DynaTemp(0.5, 1.5)], logits),
        want,
    )


def test_top_n_sigma_keeps_the_same_at_any_temperature() -> None:
    logits = make_logits(1)
    kept = distribution([SS_TopNSigma(1.5)], logits) > 0
    assert 1 < kept.sum() < VOCAB
    for t in (0.3, 3.0):
        hot = distribution([SS_Temperature(t), SS_TopNSigma(1.5)], logits)
        np.testing.assert_array_equal(hot > 0, kept)


def test_neutral_steps_vanish() -> None:
    neutral = [
        SS_DRY(0.0),
        SS_TypicalP(1.0),
        SS_TopA(0.0),
        SS_TopNSigma(0.0),
        SS_TopNSigma(-1.0),
        SS_DynaTemp(1.0, 1.0),
        SS_Smoothing(0.0),
        SS_AllowTokens([]),
    ]
    sampler = CustomSampler([*neutral, SS_Mirostat(math.inf)])
    assert [type(step) for step in sampler.steps] == [SS_Sample]
    assert not sampler.reqs_past_ids
    assert type(SS_DynaTemp(0.5, 0.5).alt()) is SS_Temperature


@pytest.mark.parametrize(
    "bad",
    [
        lambda: SS_DRY(-1.0),
        lambda: SS_DRY(1.0, 0.5),
        lambda: SS_DRY(1.0, allowed_length=0),
        lambda: SS_DRY(1.0, range=-1),
        lambda: SS_DRY(1.0, sequence_breakers=["\n"]),
        lambda: SS_TypicalP(1.1),
        lambda: SS_TopA(-0.1),
        lambda: SS_TopNSigma("many"),
        lambda: SS_DynaTemp(1.0, 0.5),
        lambda: SS_DynaTemp(-0.5, 0.5),
        lambda: SS_DynaTemp(0.5, math.inf),
        lambda: SS_Smoothing(-0.1),
        lambda: SS_Smoothing(0.1, 3.5),
        lambda: SS_Mirostat(-1.0),
        lambda: SS_Mirostat(1.0, 2.0),
        lambda: CustomSampler([SS_MinP(0.1), SS_DRY(0.8), SS_Sample()]),
        lambda: CustomSampler([SS_MinP(0.1), SS_AllowTokens([1]), SS_Sample()]),
        lambda: CustomSampler([SS_Mirostat(), SS_MinP(0.1)]),
    ],
)
def test_bad_arguments(bad) -> None:
    with pytest.raises(ConfigError):
        bad()


# Legal values, both ends of every range among them.
fraction = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
steps = st.one_of(
    st.builds(SS_TypicalP, fraction),
    st.builds(SS_TopA, fraction),
    st.builds(SS_TopNSigma, st.floats(-1.0, 1e6)),
    st.builds(
        lambda low, more, exponent: SS_DynaTemp(low, low + more, exponent),
        st.floats(0.0, 5.0),
        st.floats(0.0, 5.0),
        st.floats(0.0, 5.0),
    ),
    st.builds(SS_Smoothing, st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), st.floats(1.0, 3.0)),
)
logit_steps = st.one_of(
    st.builds(
        SS_DRY,
        st.floats(0.0, 1e30),
        st.floats(1.0, 1e6),
        st.integers(1, 4),
        st.integers(0, 30),
        st.lists(st.integers(0, 5)),
    ),
    st.builds(SS_AllowTokens, st.lists(st.integers(-2, 14)).map(lambda ids: [*ids, 3])),
)
finals = st.one_of(
    st.just(SS_Sample()),
    st.builds(SS_Mirostat, st.floats(0.0, 30.0), fraction),
    st.just(SS_Argmax()),
)
values = st.one_of(
    st.floats(-80.0, 80.0, width=32), st.sampled_from([-math.inf, 0.0, 3e38, -3e38, 1e-38])
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(values, min_size=12, max_size=12),
    st.lists(logit_steps, max_size=2),
    st.lists(steps, max_size=3),
    finals,
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 2**32 - 1),
)
def test_masked_tokens_are_never_drawn(row, first, then, final, past, key) -> None:
    """Whatever the steps: a token is drawn, it was not masked, and the input is untouched."""
    row[3] = 1.0  # allowed by every list
    logits = torch.tensor([row])
    before = logits.clone()
    sampler = CustomSampler([*first, *then, final]).clone()
    for i in range(3):
        token = int(sampler.forward(logits, torch.tensor([past]), key + i))
        assert row[token] > -math.inf
        for step in first:
            assert not isinstance(step, SS_AllowTokens) or token in step.token_ids
    assert torch.equal(logits, before)


@settings(deadline=None, max_examples=200)
@given(st.lists(values, min_size=12, max_size=12), st.lists(steps, max_size=3))
def test_the_best_token_survives_what_keeps_the_order(row, chain) -> None:
    """Of these steps typical-p alone may drop the best token."""
    chain = [step for step in chain if not isinstance(step, SS_TypicalP)]
    row[5] = 90.0
    logits = torch.tensor([row])
    sampler = CustomSampler([*chain, SS_Argmax()])
    assert row[int(sampler.forward(logits))] == max(row)


def test_everything_masked_is_an_error() -> None:
    logits = torch.full((1, 12), -math.inf)
    for step in (
        SS_TypicalP(0.5),
        SS_TopA(0.5),
        SS_TopNSigma(1),
        SS_Smoothing(1),
        SS_DynaTemp(0, 2),
    ):
        with pytest.raises(NothingToSampleError):
            CustomSampler([step, SS_Sample()]).forward(logits)
    with pytest.raises(NothingToSampleError):
        CustomSampler([SS_Mirostat()]).forward(logits)
    with pytest.raises(NothingToSampleError):
        CustomSampler([SS_AllowTokens([99]), SS_Sample()]).forward(torch.zeros(1, 12))


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.floats(0.1, 3.0),
    st.floats(1.0, 2.0),
    st.integers(1, 5),
    st.integers(0, 40),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_dry(past, multiplier, base, allowed, reach, breakers) -> None:
    logits = make_logits(0)
    step = SS_DRY(multiplier, base, allowed, reach, breakers)
    ids = torch.tensor([past], dtype=torch.long)
    state = CustomSampler([step, SS_Argmax()]).forward(logits, ids, 0, return_state=True)
    want = logits.double().flatten()
    for token, penalty in ref.dry(past, multiplier, base, allowed, reach, breakers).items():
        want[token] -= penalty
    torch.testing.assert_close(state.logits.flatten().double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [500, 2000])
@pytest.mark.parametrize("period", [1, 3, 40, 600])
def test_dry_on_long_texts(size: int, period: int) -> None:
    """Matches too long for the quick way, and some in between."""
    past = [i % period for i in range(size)]
    past[size // 2] = 700
    step = SS_DRY(0.5, 1.001, 3)
    tokens, lengths = step.matches(np.array(past))
    got: dict[int, int] = {}
    for token, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        got[token] = max(got.get(token, 0), length)
    want = {}
    for i in range(size - 1):
        n = 0
        while n <= i and past[i - n] == past[-1 - n]:
            n += 1
        if n >= 3:
            want[past[i + 1]] = max(want.get(past[i + 1], 0), n)
    assert got == want


def test_dry_looks_past_images_and_ignores_ids_outside() -> None:
    past = torch.tensor([[7, 10**9, 7, 8, 10**9, 7]])
    logits = make_logits()
    p = distribution([SS_DRY(50.0, 1.0)], logits, past)  # [10**9, 7] was followed by 8
    assert p[8] < 1e-15 and p[9] > 0
    longest = torch.tensor([[VOCAB + 3, 4, 5] * 3])
    assert distribution([SS_DRY(50.0, 1.0)], logits, longest)[4] > 0


def test_dry_breakers_are_all_tokens_with_the_text() -> None:
    class Tokenizer:
        def get_id_to_piece_list(self, special: bool) -> list[str]:
            assert special
            return ["a", "b", ".\n", "c:d", "<|im_end|>", '"', "*"]

    tokenizer = Tokenizer()
    assert SS_DRY(1.0, tokenizer=tokenizer).breakers.tolist() == [2, 3, 5, 6]
    named = SS_DRY(1.0, sequence_breakers=["<|im_end|>", "", 0], tokenizer=tokenizer)
    assert named.breakers.tolist() == [0, 4]
    assert SS_DRY(1.0, sequence_breakers="b", tokenizer=tokenizer).breakers.tolist() == [1]
    assert SS_DRY(1.0).breakers.size == 0 == SS_DRY(1.0, sequence_breakers=[]).breakers.size


@pytest.mark.parametrize("period", [1, 2, 7, 1000])
def test_dry_is_linear(period: int) -> None:
    """Texts that repeat all over, counted in comparisons of tokens."""
    compared = 0

    class Counted(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int.__eq__(self, other)

    size = 4000
    z = _common_starts([Counted(i % period) for i in range(size)])
    assert z[period] == size - period and compared <= 2 * size


def test_mirostat_follows_its_definition() -> None:
    sampler = CustomSampler([SS_Mirostat(3.0, 0.2)])
    twin = sampler.clone()
    logits = make_logits(0, 1.5)
    p, mu, said = ref.softmax(logits), 6.0, []
    for i in range(400):
        said.append(int(sampler.forward(logits, rand_u32=i)))
        surprise = -math.log2(p[said[-1]])
        assert surprise <= max(mu, -math.log2(p.max())) + 1e-4
        mu -= 0.2 * (surprise - 3.0)
    assert sampler.steps[0].mu == pytest.approx(mu, abs=1e-2)
    mean = float(-p[said[100:]].log2().mean())
    assert abs(mean - 3.0) < 0.15
    assert twin.steps[0].mu == 6.0  # copies do not share
    assert len({int(CustomSampler([SS_Mirostat(0.0, 0.0)]).forward(logits)) for _ in range(9)}) == 1


def test_ban_eos() -> None:
    tokenizer = SimpleNamespace(config=SimpleNamespace(eos_token_id_list=[4, 9]), eos_token_id=7)
    logits = make_logits()
    p = distribution([SS_BanEOS(tokenizer)], logits)
    assert np.flatnonzero(p == 0).tolist()[:3] == [4, 7, 9]


def test_combo_puts_more_steps_at_their_place() -> None:
    more = MoreSteps(
        bans=[SS_AllowTokens([1, 2])],
        penalties=[SS_DRY(0.8)],
        first_cuts=[SS_TopNSigma(1)],
        heat=SS_DynaTemp(0.5, 1.5),
        cuts=[SS_TypicalP(0.9)],
        final=SS_Mirostat(),
    )
    names = [type(s).__name__ for s in ComboSampler(min_p=0.1, temp_last=True, more=more).steps]
    want = "AllowTokens DRY TopNSigma MinP TypicalP DynaTemp Mirostat"
    assert names == [f"SS_{name}" for name in want.split()]
    greedy = ComboSampler(temperature=0.0, more=more)
    assert [type(s).__name__ for s in greedy.steps] == ["SS_AllowTokens", "SS_DRY", "SS_Argmax"]
