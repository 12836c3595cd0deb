"""The generator on a model that is split over devices: the tokens of the model on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl3 import Cache, CacheLayer_quant, Config, Generator, Job, Model
from tests.engine.fake import FakeTokenizer
from tests.engine.test_real_model import DIRECTORY
from tests.model.split_models import load_split, stand_ins

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "quantised cache": ({"layer_type": CacheLayer_quant, "k_bits": 5, "v_bits": 4}, {}),
    "host tier": ({}, {"cpu_cache_size": 4 << 20}),
    "drafts": ({}, {"ngram_match_min": 1, "num_draft_tokens": 3}),
}


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(260, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(parts: int, layer: dict[str, Any], options: dict[str, Any]) -> list[list[int]]:
    """New tokens of jobs that share prefixes, run side by side and twice, on few pages."""
    model = Model.from_config(Config.from_directory(str(DIRECTORY)))
    load_split(model, stand_ins(parts))
    assert len(model.segments) == parts
    cache = Cache(model, 256 * 4, **layer)
    generator = Generator(model, cache, FakeTokenizer(), **options)
    found: dict[int, list[int]] = {}
    start = ids(300, 0)
    prompts = [start, torch.cat([start[:, :290], ids(9, 1)], 1), ids(600, 2), ids(20, 3)]
    for again in range(2):
        for i, prompt in enumerate(prompts):
            generator.enqueue(Job(prompt, max_new_tokens=12, identifier=10 * again + i, seed=i))
        while generator.num_remaining_jobs():
            for event in generator.iterate():
                if "token_ids" in event:
                    new = event["token_ids"].reshape(-1).tolist()
                    found.setdefault(event["identifier"], []).extend(new)
    generator.check_integrity()
    if "cpu_cache_size" in options:
        assert generator.metrics["host_hits"]
    model.unload()
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_as_on_one_device(case: str) -> None:
    whole, split = generate(1, *CASES[case]), generate(3, *CASES[case])
    assert len(whole) == 8 and all(whole)
    assert split == whole
