"""What holds for every chain of steps, those of the interface page and the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3.generator.sampler import (
    SS_DRY,
    SS_XTC,
    CustomSampler,
    NothingToSampleError,
    SS_AdaptiveP,
    SS_AllowTokens,
    SS_Argmax,
    SS_BanTokens,
    SS_DynaTemp,
    SS_LogitBias,
    SS_MinP,
    SS_Mirostat,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Sample_mn,
    SS_Smoothing,
    SS_Temperature,
    SS_TopA,
    SS_TopK,
    SS_TopNSigma,
    SS_TopP,
    SS_TypicalP,
)

VOCAB = 12
fraction = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
some_ids = st.lists(st.integers(-2, VOCAB + 2), max_size=8)
span = st.integers(0, 12)
bias = st.one_of(
    st.floats(-50, 50), st.sampled_from([math.inf, -math.inf, math.nan, 1e300, -1e300])
)

edits = st.one_of(
    st.builds(SS_RepP, st.floats(0.5, 3.0), span, span),
    st.builds(SS_PresFreqP, st.floats(-5, 5), st.floats(-5, 5), span, span),
    st.builds(SS_LogitBias, st.dictionaries(st.integers(-2, VOCAB + 2), bias, max_size=4)),
    st.builds(SS_BanTokens, some_ids),
    st.builds(SS_AllowTokens, some_ids),
    st.builds(SS_DRY, st.floats(0, 100), st.floats(1, 1e3), st.integers(1, 4), span, some_ids),
)
# Cuts and temperatures that leave the best token the best.
orderly = st.one_of(
    st.builds(SS_Temperature, st.one_of(st.sampled_from([0.0, -1.0, 1e-30]), st.floats(0.01, 99))),
    st.builds(SS_TopK, st.one_of(st.integers(-1, VOCAB + 3), st.just(math.inf))),
    st.builds(SS_TopP, fraction, st.booleans()),
    st.builds(SS_MinP, fraction),
    st.builds(SS_TopA, fraction),
    st.builds(SS_TopNSigma, st.floats(0, 9)),
    st.builds(lambda low, more: SS_DynaTemp(low, low + more), st.floats(0, 3), st.floats(0, 3)),
    st.builds(SS_Smoothing, st.one_of(st.just(0.0), st.floats(1e-3, 99)), st.floats(1, 3)),
)
cuts = st.one_of(orderly, st.builds(SS_TypicalP, fraction), st.builds(SS_XTC, fraction, fraction))
finals = st.one_of(
    st.just(SS_Sample()),
    st.just(SS_Sample_mn()),
    st.just(SS_Argmax()),
    st.builds(SS_Mirostat, st.floats(0, 9), fraction),
    st.builds(SS_AdaptiveP, fraction, fraction),
)
rows = st.lists(
    st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB
)
near = st.lists(  # no probability underflows
    st.one_of(st.floats(-15, 15, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB
)
pasts = st.lists(st.integers(0, VOCAB + 1), min_size=1, max_size=30)
masks = st.one_of(st.none(), st.lists(st.booleans(), min_size=1, max_size=VOCAB))


def as_mask(allowed: list[bool] | None, packed: bool) -> torch.Tensor | None:
    if allowed is None:
        return None
    if packed:
        word = sum(1 << i for i, bit in enumerate(allowed) if bit)
        return torch.tensor([[word]], dtype=torch.int32)
    return torch.tensor([[0.0 if bit else -math.inf for bit in allowed]], dtype=torch.float16)


def possible(row: list[float], allowed: list[bool] | None, steps) -> set[int]:
    """Ids that may be drawn, by the rules alone."""
    ids = {i for i, value in enumerate(row) if value > -math.inf}
    if allowed is not None:
        ids &= {i for i, bit in enumerate(allowed) if bit}
    for step in steps:
        if isinstance(step, SS_AllowTokens) and step.token_ids:
            ids &= set(step.token_ids)
        elif isinstance(step, SS_BanTokens):
            ids -= set(step.token_ids)
        elif isinstance(step, SS_LogitBias):
            ids -= {i for i, value in step.logit_bias.items() if value < -3.4e38}
    return ids


@pytest.mark.filterwarnings("error")
@settings(deadline=None, max_examples=400)
@given(
    rows,
    masks,
    st.booleans(),
    st.lists(edits, max_size=3),
    st.lists(cuts, max_size=3),
    finals,
    pasts,
    st.integers(0, 2**32 - 1),
)
def test_only_what_is_allowed_is_drawn(row, allowed, packed, first, then, final, past, key) -> None:
    """Masked tokens stay masked, whatever comes after; nothing allowed is an error; a key gives
    the same token again; the caller's logits stay as they are."""
    logits = torch.tensor([row])
    before = logits.clone()
    mask = as_mask(allowed, packed)
    sampler = CustomSampler([*first, *then, final])
    ids = possible(row, allowed, first)
    draw = lambda: int(  # noqa: E731
        sampler.clone().forward(logits, torch.tensor([past]), key, logit_mask=mask)
    )
    if not ids:
        with pytest.raises(NothingToSampleError, match="masked"):
            draw()
        return
    token = draw()
    assert token in ids and draw() == token
    assert torch.equal(logits, before)


@settings(deadline=None, max_examples=300)
@given(rows, st.lists(edits, max_size=3), st.lists(orderly, max_size=4), pasts)
def test_greedy_is_the_best_of_the_final_logits(row, first, then, past) -> None:
    """Cuts and temperatures before `SS_Argmax` change nothing."""
    logits, ids = torch.tensor([row]), torch.tensor([past])
    plain = CustomSampler([*first, SS_Argmax()])
    try:
        state = plain.forward(logits, ids, 0, return_state=True)
    except NothingToSampleError:
        return
    final = state.logits.flatten()
    best = final.topk(2).values
    if best[0] - best[1] < 1e-3 * max(1.0, abs(float(best[0]))):
        return  # a tie, or nearly
    token = int(CustomSampler([*first, *then, SS_Argmax()]).forward(logits, ids, 0))
    assert token == int(final.argmax()) == int(state.sample)


@settings(deadline=None, max_examples=200)
@given(near, st.lists(cuts, max_size=3), st.integers(0, 2**32 - 1))
def test_cut_tokens_never_come_back(row, chain, key) -> None:
    """What a chain keeps, a longer chain keeps at most; probabilities sum to one."""
    row[2] = 1.0
    logits = torch.tensor([row])

    def kept(steps) -> set[int]:
        state = CustomSampler([*steps, SS_Argmax()]).forward(logits, None, key, return_state=True)
        if state.probs is None:
            values = state.logits.softmax(-1).flatten()
            # A small temperature may leave a probability of 0; a later one brings it back.
            ids = torch.nonzero(state.logits.flatten() > -np.inf).flatten()
        else:
            values, ids = state.probs.flatten(), state.indices.flatten()
            ids = ids[values > 0]
        assert float(values.sum()) == pytest.approx(1, abs=1e-4) and not values.isnan().any()
        return set(ids.tolist())

    before = set(np.flatnonzero(np.array(row) > -np.inf).tolist())
    for count in range(len(chain) + 1):
        now = kept(chain[:count])
        assert now and now <= before
        before = now


neutral = st.sampled_from(
    [
        SS_Temperature(1.0),
        SS_TopK(0),
        SS_TopP(1.0),
        SS_MinP(0.0),
        SS_XTC(0.0, 0.1),
        SS_XTC(1.0, 0.6),
        SS_TypicalP(1.0),
        SS_TopA(0.0),
        SS_TopNSigma(0.0),
        SS_DynaTemp(1.0, 1.0),
        SS_Smoothing(0.0),
    ]
)


@settings(deadline=None, max_examples=200)
@given(rows, st.lists(cuts, max_size=3), st.lists(neutral, max_size=4), st.data())
def test_neutral_steps_anywhere_change_nothing(row, chain, extra, data) -> None:
    row[2] = 1.0
    logits, padded = torch.tensor([row]), list(chain)
    for step in extra:
        padded.insert(data.draw(st.integers(0, len(padded))), step)
    edited = [SS_RepP(1.0), SS_PresFreqP(), SS_LogitBias({}), SS_BanTokens([]), SS_DRY(0.0)]
    for key in range(5):
        plain = CustomSampler([*chain, SS_Sample()]).forward(logits, rand_u32=key)
        more = CustomSampler([*edited, *padded, SS_Sample()]).forward(logits, rand_u32=key)
        assert int(plain) == int(more)
