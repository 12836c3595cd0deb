"""Contract 1 to 4 on a small EXL3 model on the CPU, to the bit: the logits of a request are those
it gets alone on a cold cache, whatever is cached and runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3 import Cache, CacheLayer_quant, Config, Generator, Job, Model, Tokenizer
from exl3.model.lora import LoRA
from tests.engine.test_generator import run, tokens
from tests.engine.test_real_model import DIRECTORY, job
from tests.model.peft_adapters import PeftAdapter

LAYERS: dict[str, dict[str, Any]] = {
    "float16": {},
    "quantised": {"layer_type": CacheLayer_quant, "k_bits": 5, "v_bits": 4},
}
TEXT = torch.randint(3, 500, (1, 1100), generator=torch.Generator().manual_seed(3))
NEW = 9


class Bench:
    """Answers on a cold cache, kept to be compared with."""

    def __init__(self, model: Model, tokenizer: Tokenizer, layer: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.layer = model, tokenizer, layer
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def generator(self, pages: int = 16, **options: Any) -> Generator:
        cache = Cache(self.model, pages * 256, **self.layer)
        return Generator(self.model, cache, self.tokenizer, **options)

    def alone(self, ids: torch.Tensor) -> torch.Tensor:
        key = tuple(ids[0].tolist())
        if key not in self.known:
            item = asked(ids)
            self.known[key] = logits(run(self.generator(), item)[item])
        return self.known[key]

    def check(self, ids: torch.Tensor, events: list[dict]) -> None:
        want = self.alone(ids)
        assert tokens(events) == want.argmax(-1).tolist()
        assert torch.equal(logits(events), want)


def asked(ids: torch.Tensor, **options: Any) -> Job:
    return job(ids, max_new_tokens=NEW, return_logits=True, **options)


def logits(events: list[dict]) -> torch.Tensor:
    return torch.cat([e["logits"][0] for e in events if "logits" in e])


@pytest.fixture(params=LAYERS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    model.load()
    yield Bench(model, Tokenizer.from_config(config), LAYERS[request.param])
    model.unload()


def test_cold_and_warm(bench: Bench) -> None:
    """After shorter, equal and longer prompts, and after its own answer: pages made by prefill, by
    decode steps and by both."""
    generator = bench.generator()
    for length in (300, 255, 256, 257, 300, 700, 511, 512, 1):
        ids = TEXT[:, :length]
        item = asked(ids)
        bench.check(ids, run(generator, item)[item])
    answered = asked(TEXT[:, :505])
    events = run(generator, answered)[answered]
    turn = torch.cat([TEXT[:, :505], torch.tensor([tokens(events)]), TEXT[:, 40:60]], 1)
    again = asked(turn)
    events = run(generator, again)[again]
    assert events[-1]["cached_tokens"] >= 512
    bench.check(turn, events)


@pytest.mark.parametrize("chunk", [256, 512, 2048])
def test_chunks(bench: Bench, chunk: int) -> None:
    generator = bench.generator(max_chunk_size=chunk)
    for length in (1100, 257, 900):
        ids = TEXT[:, 1100 - length :]
        item = asked(ids)
        bench.check(ids, run(generator, item)[item])


def test_batches(bench: Bench) -> None:
    """20 at once, of which others are cancelled; prompts that wait for pages; requeued ones."""
    generator = bench.generator(24)
    prompts = [TEXT[:, i * 7 : i * 7 + length] for i, length in enumerate((5, 260, 40, 600) * 5)]
    jobs = [asked(ids, max_rq_tokens=(None, 4)[i % 2]) for i, ids in enumerate(prompts)]
    generator.enqueue(list(jobs))
    events: dict[Job, list[dict]] = {item: [] for item in jobs}
    step = 0
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            events[event["job"]].append(event)
        step += 1
        if step in (3, 8):
            generator.cancel(jobs[step])
    for i, (item, ids) in enumerate(zip(jobs, prompts, strict=True)):
        if i not in (3, 8):
            bench.check(ids, events[item])


def test_drafts(bench: Bench) -> None:
    """Rows of a verifying pass are those of decode steps."""
    generator = bench.generator(ngram_match_min=1)
    for length in (24, 250, 300):
        ids = TEXT[:, :8].repeat(1, length // 8 + 1)[:, :length]
        item = asked(ids)
        bench.check(ids, run(generator, item)[item])


def test_beside_adapters(bench: Bench, tmp_path: Path) -> None:
    """A request without adapters among others that have one takes other launches."""
    ids = TEXT[:, :300]
    bench.alone(ids)
    path = PeftAdapter(bench.model, seed=1, size=0.2).save(tmp_path, "a")
    lora = LoRA.from_directory(bench.model, path)
    jobs = [asked(ids, loras=[lora]), asked(ids, loras=[]), asked(ids[:, :20], loras=[lora])]
    events = run(bench.generator(), *jobs)
    bench.check(ids, events[jobs[1]])
    assert not torch.equal(logits(events[jobs[0]]), bench.alone(ids))
