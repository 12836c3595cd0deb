"""The generator on CUDA: the same tokens whether they are drawn on the device or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake import FakeTokenizer

from exl3 import Cache, Config, Generator, Job, Model
from exl3.generator import drawing
from exl3.sampling import ArgmaxSampler, ComboSampler, DefaultSampler, TopPSampler

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
pytestmark = pytest.mark.cuda


SAMPLERS = [
    ArgmaxSampler(),
    DefaultSampler(),
    TopPSampler(0.9, 1.1),
    ComboSampler(1.2, 0.1, 0.2, 16, 8, 0.9, 0.01, 40, 0.95, logit_bias={3: 2.0, 4: -100.0}),
]


def prompt(length: int, seed: int) -> torch.Tensor:
    return torch.randint(260, (1, length), generator=torch.Generator().manual_seed(seed))


def tokens(
    device: torch.device, negative: Sequence[torch.Tensor] = (), **options: Any
) -> list[list[int]]:
    """New tokens of four jobs with four samplers that run side by side."""
    model = Model.from_config(Config.from_directory(str(GOLDEN / "tiny_llama_exl3")))
    model.load(device=str(device))
    cache = Cache(model, 256 * 8)
    generator = Generator(model, cache, FakeTokenizer())
    jobs = [
        Job(
            [prompt(20 + i, i), *negative],
            max_new_tokens=24,
            sampler=sampler,
            seed=i,
            identifier=i,
            **options,
        )
        for i, sampler in enumerate(SAMPLERS)
    ]
    generator.enqueue(jobs)
    ids: dict[int, list[int]] = {i: [] for i in range(len(jobs))}
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            if "token_ids" in event:
                ids[event["identifier"]] += event["token_ids"].reshape(-1).tolist()
    model.unload()
    return list(ids.values())


GUIDED = {"negative": [torch.tensor([[5, 9, 7]])], "cfg_scale": 1.5}


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
def test_device_draws_what_the_host_draws(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, guidance: dict[str, Any]
) -> None:
    drawn: list[int | None] = []
    inner = drawing._on_device

    def note(*args: Any) -> list[int | None]:
        result = inner(*args)
        drawn.extend(result)
        return result

    monkeypatch.setattr(drawing, "_on_device", note)
    there = tokens(device, **guidance)
    assert len(drawn) == 4 * 24 and None not in drawn
    assert all(len(ids) == 24 for ids in there) and there[0] != there[1]
    assert tokens(device, return_top_tokens=3, return_probs=True, **guidance) == there
    monkeypatch.setattr(drawing, "_on_device", lambda plans, logits: [None] * len(logits.raw))
    assert tokens(device, **guidance) == there
