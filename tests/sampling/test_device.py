"""Samplers on a device: which fit, what their plans say, and the same tokens as on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exl3.errors import ShapeError
from exl3.ops.sampling import sample
from exl3.sampling import (
    SS_XTC,
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    SS_Argmax,
    SS_BanTokens,
    SS_LogitBias,
    SS_MinP,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Sample_mn,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
    TopKSampler,
    TopPSampler,
)
from exl3.sampling.device import fits_device, row_plan
from exl3.sampling.state import Row

PENALTIES = [SS_RepP(1.3, 5, 8), SS_PresFreqP(0.4, 0.25, 3, 6)]
BIAS = SS_LogitBias({1: 2.0, 7: -np.inf, 12: -1.5, 10**9: 3.0})


def chains() -> dict[str, CustomSampler]:
    return {
        "argmax": ArgmaxSampler(),
        "default": DefaultSampler(),
        "categorical": CategoricalSampler(0.7),
        "plain": CategoricalSampler(),
        "top_k": TopKSampler(40, 1.3),
        "top_k_wide": TopKSampler(5000, 1.3),
        "top_p": TopPSampler(0.9, 0.8),
        "top_p_first": TopPSampler(0.6, 1.2, temperature_last=True),
        "top_p_tiny": TopPSampler(0.001),
        "inclusive": CustomSampler([SS_TopP(0.7, inclusive=True), SS_Sample()]),
        "combo": ComboSampler(1.1, 0.2, 0.3, 20, 10, 0.9, 0.02, 50, 0.95, True),
        "edits": CustomSampler([BIAS, *PENALTIES, SS_BanTokens([3, 4]), SS_Argmax()]),
        "twice": CustomSampler(
            [SS_Temperature(0.5), SS_TopK(30), SS_Temperature(2.0), SS_TopP(0.8), SS_Sample()]
        ),
        "cold": CustomSampler([SS_MinP(0.1), SS_Temperature(0.0), SS_Sample()]),
        "hot_argmax": CustomSampler([SS_Temperature(3.0), SS_TopK(9), SS_Argmax()]),
        "min_p_one": CustomSampler([SS_MinP(1.0), SS_Sample()]),
    }


def rows(width: int) -> torch.Tensor:
    """Rows of several characters: wide, peaked, flat, with ties, mostly masked."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(6, width, generator=generator)
    x[0] *= 3
    x[1] = x[1].exp() * 4 - 20
    x[2] = 0.25
    x[3] = (x[3] * 2).round()
    x[4, torch.rand(width, generator=generator) > 0.01] = -torch.inf
    x[4, 0] = 0.0
    x[5] = x[5] * 0.01 + 30
    return x


def test_which_chains_fit() -> None:
    assert all(fits_device(chain) for chain in chains().values())
    odd = [
        CustomSampler([SS_Sample_mn()]),
        CustomSampler([SS_MinP(0.1), SS_XTC(0.5, 0.1), SS_Sample()]),
        CustomSampler([SS_RepP(1.2), BIAS, SS_Sample()]),
        CustomSampler([SS_RepP(1.2), SS_RepP(1.2), SS_Sample()]),
        CustomSampler([SS_Temperature(2.0)] * 9 + [SS_Sample()]),
    ]
    assert not any(fits_device(chain) for chain in odd)

    class Own(SS_TopK):
        def apply(self, row: Row) -> None:
            pass

    assert not fits_device(CustomSampler([Own(3), SS_Sample()]))
    assert not fits_device(object())


def test_edits_are_what_the_steps_do() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64).numpy() * 3
    past = np.random.default_rng(0).integers(-2, 70, 40)
    chain = CustomSampler([BIAS, *PENALTIES, SS_BanTokens([3, 4, 99]), SS_Argmax()])
    row = Row(logits.copy(), 64, 0, past)
    for step in chain.steps[:-1]:
        step.apply(row)
    plan = row_plan(chain, key=1, past_ids=past, mask=None, width=64)
    assert plan is not None and len(np.unique(plan.edits["id"])) == plan.edits.size
    assert (plan.rep_p, plan.freq_p, plan.pres_p) == (1.3, 0.25, 0.4)
    got = logits.copy()
    for edit in plan.edits:
        v = np.float32(got[edit["id"]] + edit["bias"])
        if edit["rep"] > 0 and np.isfinite(v):
            full = float(v) / 1.3 if v > 0 else float(v) * 1.3
            v = np.float32((1 - edit["rep"]) * float(v) + edit["rep"] * full)
        v = np.float32(float(v) - 0.25 * edit["total"])
        got[edit["id"]] = np.float32(float(v) - 0.4 * edit["largest"])
    assert np.array_equal(got, row.logits)


def test_masks_as_bits() -> None:
    chain = DefaultSampler()
    packed = torch.tensor([[-1, 5]], dtype=torch.int32)
    plan = row_plan(chain, key=0, past_ids=None, mask=packed, width=100)
    assert plan is not None and plan.mask is not None
    assert plan.mask.tolist() == [0xFFFFFFFF, 5, 0, 0]
    added = torch.full((1, 40), -torch.inf).half()
    added[0, [1, 33]] = 0
    plan = row_plan(chain, key=0, past_ids=None, mask=added, width=100)
    assert plan is not None and plan.mask is not None and plan.mask.tolist() == [2, 2, 0, 0]
    added[0, 3] = 0.5
    assert row_plan(chain, key=0, past_ids=None, mask=added, width=100) is None


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 2, 31, 33, 1000, 49152, 128256])
def test_tokens_of_the_host(device: torch.device, width: int) -> None:
    logits = torch.nn.functional.pad(rows(width), (0, 7), value=1e9)
    there = logits.to(device)
    past = np.random.default_rng(width).integers(0, width, 60)
    mask = torch.rand(width, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0] = True
    mask_half = torch.where(mask, 0.0, -torch.inf).half()[None]
    for name, chain in chains().items():
        for key in (7, 2**32 - 1):
            for given in (None, mask_half):
                plan = row_plan(chain, key=key, past_ids=past, mask=given, width=width)
                assert plan is not None
                got = sample(there, width, [plan] * len(logits)).tolist()
                for row in range(len(logits)):
                    known = logits[row, :width].numpy()
                    try:
                        want = chain.draw(known, key=key, past_ids=past, mask=given)
                    except ValueError:
                        want = -1
                    assert got[row] == want, (name, key, row, given is not None)
    assert torch.equal(there.cpu(), logits)  # edits are undone


@pytest.mark.cuda
def test_each_row_has_its_own_plan(device: torch.device) -> None:
    logits = rows(500).repeat(4, 1)
    past = np.arange(40)
    everything = list(chains().values())
    plans, want = [], []
    for row in range(len(logits)):
        chain = everything[row % len(everything)]
        mask = torch.zeros(1, 500 - row).half() if row % 3 else None
        plan = row_plan(chain, key=row, past_ids=past, mask=mask, width=500)
        assert plan is not None
        plans.append(plan)
        known = logits[row].numpy()
        want.append(chain.draw(known, key=row, past_ids=past, mask=mask))
    there = logits.to(device)
    assert sample(there, 500, plans).tolist() == want
    assert sample(there[:0], 500, []).shape == (0,)


def test_masks_of_another_size_are_refused() -> None:
    plan = row_plan(DefaultSampler(), key=0, past_ids=None, mask=torch.ones(1, 9).half(), width=40)
    assert plan is None  # adds ones
    mask = torch.zeros(1, 40).half()
    plan = row_plan(DefaultSampler(), key=0, past_ids=None, mask=mask, width=40)
    assert plan is not None
    with pytest.raises(ShapeError, match="needs 3 words"):
        sample(torch.zeros(1, 96), 96, [plan])


@pytest.mark.cuda
def test_rows_left_to_the_host(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0, 5] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    plan = row_plan(DefaultSampler(), key=1, past_ids=None, mask=None, width=300)
    assert plan is not None
    got = sample(logits, 300, [plan] * 4).tolist()
    assert got[:3] == [-1, -1, -1] and got[3] >= 0
    banned = CustomSampler([SS_BanTokens(range(300)), SS_Sample()])
    plan = row_plan(banned, key=1, past_ids=None, mask=None, width=300)
    assert plan is not None and sample(logits[3:], 300, [plan]).tolist() == [-1]
