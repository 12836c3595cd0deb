"""Every sampling step against its definition in plain float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exl3.generator.sampler import (
    SS,
    SS_XTC,
    AdaptivePSampler,
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    NothingToSampleError,
    SS_AdaptiveP,
    SS_Argmax,
    SS_BanTokens,
    SS_Base,
    SS_LogitBias,
    SS_MinP,
    SS_Normalize,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Sample_mn,
    SS_Sort,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
    TopKSampler,
    TopPSampler,
)
from tests.sampling import reference as ref

VOCAB = 500
PAST = torch.tensor([[5, 7, 5, 9, 499, 1_000_000_000, 7, 3, 5, 600]])


def make_logits(seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(steps, logits: torch.Tensor, past=PAST) -> np.ndarray:
    """What the final step of these steps and `SS_Sample` draws from."""
    state = CustomSampler([*steps, SS_Sample()]).forward(logits, past, 0, return_state=True)
    out = np.zeros(VOCAB)
    values = state.probs if state.probs is not None else state.logits.softmax(-1)
    ids = state.indices if state.indices is not None else torch.arange(VOCAB).unsqueeze(0)
    out[ids[0].numpy()] = values[0].numpy()
    return out


def close(got: np.ndarray, want: np.ndarray) -> None:
    # The final step drops tokens that can never win.
    want = np.where(want > want.max() * 1e-17, want, 0)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (SS_Temperature(0.7), lambda p: ref.temperature(p, 0.7)),
        (SS_Temperature(3.0), lambda p: ref.temperature(p, 3.0)),
        (SS_TopK(7), lambda p: ref.top_k(p, 7)),
        (SS_TopK(7.0), lambda p: ref.top_k(p, 7)),
        (SS_TopK(VOCAB), lambda p: p),
        (SS_TopK(10**9), lambda p: p),
        (SS_TopP(0.9), lambda p: ref.top_p(p, 0.9)),
        (SS_TopP(0.2), lambda p: ref.top_p(p, 0.2)),
        (SS_TopP(0.0), lambda p: ref.top_k(p, 1)),
        (SS_TopP(0.9999), lambda p: ref.top_p(p, 0.9999)),
        (SS_MinP(0.08), lambda p: ref.min_p(p, 0.08)),
        (SS_MinP(1.0), lambda p: ref.top_k(p, 1)),
        (SS_XTC(0.5, 0.05), lambda p: ref.xtc(p, 0.5, 0.05)),
        (SS_XTC(0.3, 0.01), lambda p: ref.xtc(p, 0.3, 0.01)),
    ],
)
def test_step(step: SS_Base, rule, seed: int) -> None:
    logits = make_logits(seed)
    close(distribution([step], logits), rule(ref.softmax(logits.flatten().numpy())))


@pytest.mark.parametrize("seed", range(5))
def test_steps_see_the_survivors_renormalised(seed: int) -> None:
    logits = make_logits(seed, 1.5)
    steps = [SS_TopK(40), SS_TopP(0.8), SS_MinP(0.2), SS_Temperature(1.7), SS_XTC(0.6, 0.1)]
    p = ref.softmax(logits.flatten().numpy())
    p = ref.min_p(ref.top_p(ref.top_k(p, 40), 0.8), 0.2)
    close(distribution(steps, logits), ref.xtc(ref.temperature(p, 1.7), 0.6, 0.1))


@pytest.mark.parametrize(("sustain", "decay"), [(10**8, 0), (3, 0), (3, 4), (0, 6), (1, 1)])
@pytest.mark.parametrize("strength", [1.3, 0.8])
def test_penalties(sustain: int, decay: int, strength: float) -> None:
    logits, past = make_logits(), PAST[0].tolist()
    got = distribution([SS_RepP(strength, sustain, decay)], logits)
    want = ref.rep_p(logits.flatten().numpy(), past, strength, sustain, decay)
    close(got, ref.softmax(want))
    got = distribution([SS_PresFreqP(strength - 1, 0.4, sustain, decay)], logits)
    want = ref.pres_freq_p(logits.flatten().numpy(), past, strength - 1, 0.4, sustain, decay)
    close(got, ref.softmax(want))


def test_bias_and_bans() -> None:
    logits = make_logits()
    bias = {3: 2.0, 4: -math.inf, 5: math.nan, 6: math.inf, 7: 1e400, 8: -1e300, 900: 5.0, -1: 2.0}
    p = distribution([SS_LogitBias({**bias, 9: 10**400}), SS_BanTokens([10, 11, 900])], logits)
    want = logits.flatten().numpy().copy()
    want[3] += 2
    want[[4, 8, 10, 11]] = -np.inf
    close(p, ref.softmax(want))


def test_logits_are_not_modified() -> None:
    logits = make_logits()
    before = logits.clone()
    sampler = ComboSampler(1.2, 0.1, 0.1, temperature=0.7, min_p=0.01, logit_bias={3: 1.0})
    sampler.forward(logits, PAST, 1)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("final", [SS_Sample, SS_Sample_mn])
def test_draws_follow_the_distribution(final: type[SS_Base]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf, 0.5, -1.0]])
    sampler = CustomSampler([SS_Temperature(0.9), final()])
    count = 4000
    drawn = [int(sampler.forward(logits, rand_u32=i * 2654435761 % 2**32)) for i in range(count)]
    want = ref.softmax(logits[0].numpy() / 0.9) * count
    got = np.bincount(drawn, minlength=6)
    assert got[3] == 0
    kept = want > 0
    assert ((got - want)[kept] ** 2 / want[kept]).sum() < 20.5  # 0.1 % tail of 4 degrees


def test_a_key_repeats_its_draw_whatever_was_cut() -> None:
    logits = make_logits(0, 0.5)
    ids = [int(CategoricalSampler().forward(logits, rand_u32=k)) for k in range(50)]
    assert ids == [int(CategoricalSampler().forward(logits, rand_u32=k)) for k in range(50)]
    assert len(set(ids)) > 20
    wide = torch.cat([logits, torch.full((1, 1, 12), -math.inf)], -1)
    assert ids == [int(CategoricalSampler().forward(wide, rand_u32=k)) for k in range(50)]


def test_neutral_steps_vanish() -> None:
    neutral = [
        SS_LogitBias({1: 0.0}),
        SS_BanTokens([]),
        SS_RepP(1.0),
        SS_RepP(1.5, 0, 0),
        SS_PresFreqP(0.0, 0.0),
        SS_Temperature(1.0),
        SS_TopK(0),
        SS_TopK(-1),
        SS_TopP(1.0),
        SS_MinP(0.0),
        SS_XTC(0.0, 0.1),
        SS_XTC(0.5, 0.6),
    ]
    sampler = CustomSampler([*neutral, SS_AdaptiveP(1.0)])
    assert [type(step) for step in sampler.steps] == [SS_Sample]
    assert not sampler.reqs_past_ids


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([SS_MinP(0.1)], "must choose"),
        ([], "must choose"),
        ([SS_Argmax(), SS_Argmax()], "SS_Argmax comes after"),
        ([SS_Sample(), SS_MinP(0.1)], "SS_MinP comes after"),
        ([SS_MinP(0.1), SS_RepP(1.2), SS_Sample()], "SS_RepP needs logits"),
        ([SS_TopK(5), SS_LogitBias({1: 1.0}), SS_Sample()], "SS_LogitBias needs logits"),
        ([object(), SS_Sample()], "SS_Base"),
    ],
)
def test_misplaced_steps(steps, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CustomSampler(steps)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: SS_TopP(1.1),
        lambda: SS_MinP(-0.1),
        lambda: SS_Temperature("hot"),
        lambda: SS_TopK(1.5),
        lambda: SS_RepP(0.0),
        lambda: SS_RepP(1.2, -1),
        lambda: TopKSampler(0),
        lambda: SS_MinP(math.nan),
    ],
)
def test_bad_arguments(bad) -> None:
    with pytest.raises(ValueError):
        bad()


def test_greedy_forms() -> None:
    logits = make_logits()
    best = int(logits.argmax())
    for sampler in (
        ArgmaxSampler(),
        CategoricalSampler(0.0),
        TopKSampler(1),
        TopKSampler(9, 0.0),
        TopPSampler(0.0),
        TopPSampler(0.5, 0.0),
        ComboSampler(temperature=0.0, min_p=0.1),
        ComboSampler(top_k=1),
        CustomSampler([SS_TopP(0.5), SS_Temperature(0.5), SS_Argmax()]),
        CustomSampler([SS_Temperature(0.0), SS_Sample()]),
        CustomSampler([SS_Temperature(1e-30), SS_Sample()]),
    ):
        assert int(sampler.forward(logits, PAST, 5)) == best
    assert ArgmaxSampler().is_greedy and not DefaultSampler().is_greedy


@pytest.mark.parametrize("sampler", [ArgmaxSampler(), DefaultSampler(), TopPSampler(0.5, 0.7)])
def test_masks(sampler: CustomSampler) -> None:
    logits = make_logits()
    tokenizer = SimpleNamespace(actual_vocab_size=VOCAB - 20)
    additive = torch.full((1, 100), -torch.inf, dtype=torch.float16)
    additive[0, [40, 41]] = 0
    words = torch.zeros(1, 4, dtype=torch.int32)
    words[0, 1] = (1 << 8) | (1 << 9)
    words[0, 3] = -(1 << 31)  # bit 127
    for key in range(20):
        a = int(sampler.forward(logits, None, key, tokenizer, additive))
        assert a in (40, 41)
        assert int(sampler.forward(logits, None, key, tokenizer, words)) in (40, 41, 127)
    with pytest.raises(NothingToSampleError, match="masked"):
        sampler.forward(logits, None, 0, tokenizer, torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(NothingToSampleError, match="NaN"):
        sampler.forward(logits * torch.nan, None, 0)


def test_padding_columns_are_never_drawn() -> None:
    logits = make_logits()
    logits[..., 300:] = 1000.0
    tokenizer = SimpleNamespace(actual_vocab_size=300)
    assert int(ArgmaxSampler().forward(logits, tokenizer=tokenizer)) < 300


def test_infinite_logits() -> None:
    logits = make_logits()
    logits[..., [4, 9]] = torch.inf
    drawn = {int(CategoricalSampler(0.8).forward(logits, rand_u32=i)) for i in range(30)}
    assert drawn == {4, 9}


def test_shapes() -> None:
    logits = torch.cat([make_logits(i) for i in range(6)]).view(2, 3, VOCAB)
    ids = ArgmaxSampler().forward(logits)
    assert torch.equal(ids, logits.argmax(-1))
    assert DefaultSampler().forward(logits[0], rand_u32=1).shape == (3,)


def test_top_p_inclusive_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for limit, inclusive, kept in [
        (0.6, False, 1),
        (0.8, False, 2),
        (0.6, True, 2),
        (0.5, True, 1),
        (0.81, True, 3),
    ]:
        state = CustomSampler([SS_TopP(limit, inclusive=inclusive), SS_Sample()]).forward(
            logits, rand_u32=0, return_state=True
        )
        assert state.probs.shape[-1] == kept, (limit, inclusive)


def test_xtc_protects() -> None:
    logits = make_logits(1, 1.0)
    logits[0, 0, [1, 2, 3]] = torch.tensor([8.0, 7.8, 7.5])
    p = ref.softmax(logits.flatten().numpy())
    close(distribution([SS_XTC(0.9, 0.1, [1])], logits), ref.xtc(p, 0.9, 0.1, [1]))

    class Tokenizer:
        extended_id_to_piece = {2: "<x>"}  # noqa: RUF012

        def get_id_to_piece_list(self, special: bool) -> list[str]:
            return ["a", "\n\n", "<x>", "b"]

    want = ref.xtc(p, 0.9, 0.1, [1, 2])
    close(distribution([SS_XTC(0.9, 0.1, tokenizer=Tokenizer())], logits), want)


def test_xtc_of_everything_leaves_the_least_likely_that_is_not_masked() -> None:
    logits = torch.tensor([[1.0, 0.5, -math.inf, 0.7]])
    assert int(CustomSampler([SS_XTC(1.0, 0.0), SS_Sample()]).forward(logits)) == 1


def test_adaptive_p_remembers_and_copies_do_not_share() -> None:
    sampler = AdaptivePSampler(0.0, 0.3, 0.9)
    twin = sampler.clone()
    logits = make_logits(2, 1.0)
    first = [int(sampler.forward(logits, rand_u32=i)) for i in range(30)]
    assert first == [int(twin.forward(logits, rand_u32=i)) for i in range(30)]
    step = sampler.steps[-1]
    p = ref.softmax(logits.flatten().numpy())
    w, t = 0.3 / 0.1, 1 / 0.1
    for token in first:
        w, t = p[token] + 0.9 * w, 1 + 0.9 * t
    assert (step.weighted, step.total) == pytest.approx((w, t), rel=1e-4)


class Halve(SS_Base):
    """A custom step on logits."""

    def run(self, state) -> None:
        assert state.state in (SS.INIT, SS.LOGITS) and state.bsz == 1 and state.dim == VOCAB
        state.logits = (state.in_logits if state.state is SS.INIT else state.logits) * 0.5
        state.state = SS.LOGITS


class SecondBest(SS_Base):
    """A custom final step on sorted probabilities."""

    def prep(self, in_state: SS):
        return [SS_Sort, SS_Normalize]

    def run(self, state) -> None:
        assert state.state is SS.PROBS_N_S
        assert (state.probs.diff() <= 0).all()
        assert float(state.probs.sum()) == pytest.approx(1, abs=1e-5)
        state.sample = state.indices[:, 1]
        state.state = SS.DONE


def test_custom_steps() -> None:
    logits = make_logits()
    got = distribution([Halve(), SS_MinP(0.1)], logits)
    close(got, ref.min_p(ref.softmax(logits.flatten().numpy() * 0.5), 0.1))
    for steps in ([SecondBest()], [SS_TopK(5), SecondBest()], [Halve(), SecondBest()]):
        token = int(CustomSampler(steps).forward(logits))
        assert token == int(logits.flatten().topk(2).indices[1])
