"""Every family on a quantised cache: windows, head norms, biases, head dims that are no blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, random_ids

from exl3 import Cache, CacheLayer_quant, Model


def logits(model: Model, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Prefill in two chunks, then one step at a time; logits of the second chunk and the steps."""
    cache = Cache(model, 512, **options)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    model.prefill(ids[:, :20], {**params, "past_len": 0})
    parts = [model.forward(ids[:, 20:30], {**params, "past_len": 20})]
    parts += [model.forward(ids[:, i : i + 1], {**params, "past_len": i}) for i in range(30, 40)]
    cache.detach_from_model()
    return torch.cat(parts, 1)[..., :300]


@pytest.mark.parametrize("family", FAMILIES)
def test_error_falls_with_the_bits(family: str, tiny: Callable[..., Any]) -> None:
    model, ids = tiny(family).load(), random_ids(2, 40)
    want = logits(model, ids)
    errors = []
    for bits in ((2, 2), (3, 5), (5, 4), (8, 8)):
        got = logits(model, ids, layer_type=CacheLayer_quant, k_bits=bits[0], v_bits=bits[1])
        errors.append(float((got - want).std() / want.std()))
    assert errors[0] > 1.5 * errors[1] > 1.5 * errors[2] > 3 * errors[3], errors
    assert errors[3] < 0.03, errors
