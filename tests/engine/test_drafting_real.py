"""Drafting on a small EXL3 model: not a bit changes, whatever cache and adapters there are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3 import (
    ArgmaxSampler,
    AsyncGenerator,
    AsyncJob,
    Cache,
    CacheLayer_fp16,
    CacheLayer_quant,
    Config,
    DefaultSampler,
    Generator,
    Job,
    Model,
    Tokenizer,
)
from exl3.model.lora import LoRA
from tests.engine.test_generator import run, text, tokens
from tests.engine.test_real_model import DIRECTORY, prompt
from tests.model.peft_adapters import PeftAdapter

LENGTHS = (5, 250, 255, 300)
LAYERS: dict[str, dict[str, Any]] = {
    "float16": {"layer_type": CacheLayer_fp16},
    "quantised": {"layer_type": CacheLayer_quant, "k_bits": 5, "v_bits": 3},
}


@pytest.fixture
def loaded():
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    model.load()
    yield model, Tokenizer.from_config(config)
    model.unload()


def repeating(length: int) -> torch.Tensor:
    return prompt(12, length).repeat(1, length // 12 + 1)[:, :length]


class Bench:
    """Answers from a cold cache, with and without drafts."""

    def __init__(self, model: Model, tokenizer: Tokenizer, **layer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache, self.draft_cache = (Cache(model, 2048, **layer) for _ in range(2))
        self.drafters = {
            "none": {},
            "ngram": {"ngram_match_min": 2},
            "model": {"draft_model": model, "draft_cache": self.draft_cache},
        }

    def answers(self, kind: str, *lengths: int, **options: Any) -> list[list[dict]]:
        arguments = {"num_draft_tokens": 3, **self.drafters[kind]}
        generator = Generator(self.model, self.cache, self.tokenizer, **arguments)
        jobs = []
        for length in lengths:
            own = {key: value[length] for key, value in options.items()}
            sampler = DefaultSampler() if length == 250 else ArgmaxSampler()
            ids = repeating(length)
            more = {"max_new_tokens": 24, "return_logits": True, "seed": length}
            jobs.append(Job(ids, sampler=sampler, **more, **own))
        return list(run(generator, *jobs).values())


def same(want: list[dict], events: list[dict], *, logits: bool = True) -> None:
    assert tokens(want) == tokens(events) and text(want) == text(events)
    for a, b in zip(want, events, strict=True):
        assert ("logits" in a) == ("logits" in b)
        assert not logits or "logits" not in a or torch.equal(a["logits"], b["logits"])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafting_changes_no_bit(loaded, kind: str, layer: str) -> None:
    """The logits of every token, alone and together."""
    bench = Bench(*loaded, **LAYERS[layer])
    plain = [bench.answers("none", n)[0] for n in LENGTHS]
    alone = [bench.answers(kind, n)[0] for n in LENGTHS]
    together = bench.answers(kind, *LENGTHS)
    for got in (alone, together):
        for want, events in zip(plain, got, strict=True):
            same(want, events)
        assert sum(events[-1]["accepted_draft_tokens"] for events in got) > 10
        rejected = [events[-1]["rejected_draft_tokens"] for events in got]
        assert kind == "ngram" or not sum(rejected[:1] + rejected[2:])  # of the greedy ones


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_jobs_with_adapters(loaded, kind: str, tmp_path: Path) -> None:
    model, tokenizer = loaded
    directory = PeftAdapter(model, seed=1, size=0.2).save(tmp_path, "a")
    lora = LoRA.from_directory(model, directory)
    bench = Bench(model, tokenizer)
    loras = {40: [lora], 50: []}
    plain = [bench.answers("none", n, loras=loras)[0] for n in loras]
    for want, events in zip(plain, bench.answers(kind, *loras, loras=loras), strict=True):
        same(want, events)


def nearly_same(want: list[dict], events: list[dict]) -> None:
    """The same tokens and, but for rounding, logits, up to a token that rounding decides."""
    rows = [torch.cat([e["logits"][0] for e in own if "logits" in e]) for own in (want, events)]
    ids = [tokens(own) for own in (want, events)]
    for a, b, one, other in zip(*rows, *ids, strict=True):
        near = 0.03 * float(a[:500].std())
        assert float((a - b)[:500].abs().max()) < 2 * near
        if one != other:
            assert float(a[one] - a[other]) < 2 * near
            return


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_on_a_device(request, kind: str, where: str) -> None:
    place = "cpu" if where == "cpu" else str(request.getfixturevalue("device"))
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    model.load(device=place)
    bench = Bench(model, Tokenizer.from_config(config))
    lengths = tuple(n for n in LENGTHS if n != 250)  # greedy ones
    plain = [bench.answers("none", n)[0] for n in lengths]
    accepted = 0
    for events, want in zip(bench.answers(kind, *lengths), plain, strict=True):
        nearly_same(want, events)
        accepted += events[-1]["accepted_draft_tokens"]
    assert accepted > 10
    model.unload()


def test_asynchronous_jobs(loaded) -> None:
    bench = Bench(*loaded)

    async def answers() -> list[tuple[list[int], str, int]]:
        generator = AsyncGenerator(
            bench.model, bench.cache, bench.tokenizer, num_draft_tokens=3, **bench.drafters["model"]
        )

        async def one(length: int) -> tuple[list[int], str, int]:
            job = AsyncJob(
                generator,
                input_ids=repeating(length),
                max_new_tokens=24,
                sampler=ArgmaxSampler() if length != 250 else DefaultSampler(),
                seed=length,
            )
            events = [event async for event in job]
            return tokens(events), text(events), events[-1]["accepted_draft_tokens"]

        cancelled = AsyncJob(generator, input_ids=repeating(60), max_new_tokens=500)
        got = await asyncio.gather(*(one(n) for n in LENGTHS))
        await cancelled.cancel()
        counts = generator.generator.metrics
        assert counts["accepted_draft_tokens"] == sum(accepted for *_, accepted in got)
        await generator.close()
        return got

    plain = [bench.answers("none", n)[0] for n in LENGTHS]
    for want, (ids, said, accepted) in zip(plain, asyncio.run(answers()), strict=True):
        assert (ids, said) == (tokens(want), text(want)) and accepted > 0
