"""The generator on a small EXL3 model: the equivalences of the correctness contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3 import (
    ArgmaxSampler,
    Cache,
    CacheLayer_quant,
    Config,
    DefaultSampler,
    Generator,
    Job,
    Model,
    Tokenizer,
    evaluation,
)
from tests.engine.test_generator import run, text, tokens

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"


@pytest.fixture(scope="module")
def loaded():
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache = Cache(model, 2048)
    model.load()
    yield model, cache, Tokenizer.from_config(config)
    model.unload()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (1, length), generator=source)


def job(ids: torch.Tensor, **kwargs) -> Job:
    kwargs.setdefault("sampler", ArgmaxSampler())
    return Job(ids, max_new_tokens=kwargs.pop("max_new_tokens", 6), **kwargs)


def check(loaded, ids: torch.Tensor, events: list[dict]) -> None:
    """The logits of every step are those of one pass without a cache, but for what float16 keys
    and values change, against a spread of 0.8."""
    model, _, tokenizer = loaded
    got = torch.cat([e["logits"][0] for e in events if "logits" in e])
    said = tokens(events)
    whole = torch.cat([ids, torch.tensor([said])], 1)
    want = model.forward(whole)[0, ids.shape[1] - 1 : -1]
    width = tokenizer.actual_vocab_size
    assert (got - want)[:, :width].abs().max() < 0.1
    assert said == got.argmax(-1).tolist() and len(said) == 6
    assert text(events) == tokenizer.decode(torch.tensor(said))


def test_cached_batched_chunked_and_warm(loaded) -> None:
    generator = Generator(*loaded, max_chunk_size=256)
    lengths = (5, 255, 256, 257, 300)
    for n in lengths:  # one after another: cold
        item = job(prompt(n), return_logits=True)
        check(loaded, prompt(n), run(generator, item)[item])
    again = [job(prompt(n), return_logits=True) for n in lengths]
    events = run(generator, *again)
    for n, item in zip(lengths, again, strict=True):  # together: warm
        check(loaded, prompt(n), events[item])
        assert events[item][-1]["cached_tokens"] > 0


def test_seed_gives_the_same_tokens_in_any_batch(loaded) -> None:
    generator = Generator(*loaded)
    one = job(prompt(40), sampler=DefaultSampler(), seed=7, max_new_tokens=8)
    first = tokens(run(generator, one)[one])
    two = job(prompt(40), sampler=DefaultSampler(), seed=7, max_new_tokens=8)
    rest = [job(prompt(30, i), sampler=DefaultSampler(), seed=i) for i in range(3)]
    assert tokens(run(generator, rest[0], two, *rest[1:])[two]) == first


def test_requeue(loaded) -> None:
    generator = Generator(*loaded)
    plain = job(prompt(250), max_new_tokens=12)
    want = tokens(run(generator, plain)[plain])
    stepped = job(prompt(250), max_new_tokens=12, max_rq_tokens=1)
    events = run(generator, stepped)[stepped]
    assert tokens(events) == want and sum("requeue" in e for e in events) == 1


def test_evicted_pages_come_back_from_host_memory(loaded) -> None:
    model, _, tokenizer = loaded
    cache = Cache(model, 768)
    generator = Generator(model, cache, tokenizer, cpu_cache_size=1 << 22)
    for n in (600, 700):
        run(generator, job(prompt(n, n)))
    again = job(prompt(600, 600), return_logits=True)
    events = run(generator, again)[again]
    check(loaded, prompt(600, 600), events)
    assert events[-1]["cached_tokens"] >= 512
    assert generator.cpu_page_cache.metrics["restored_pages"] >= 1
    cache.detach_from_model()


@pytest.mark.parametrize("bits", [None, (4, 3)])
def test_pages_survive_a_restart(loaded, bits, tmp_path) -> None:
    model, _, tokenizer = loaded

    def once(bits):
        kind = {}
        if bits:
            kind = {"layer_type": CacheLayer_quant, "k_bits": bits[0], "v_bits": bits[1]}
        cache = Cache(model, 1024, **kind)
        generator = Generator(model, cache, tokenizer, disk_cache_dir=tmp_path)
        item = job(prompt(700, 9))
        events = run(generator, item)[item]
        generator.close()
        cache.detach_from_model()
        return tokens(events), events[-1]["cached_tokens"]

    first, cold = once(bits)
    second, warm = once(bits)
    assert (second, cold, warm) == (first, 0, 512)
    assert once((5, 5))[1] == 0  # another encoding


def test_generate_and_rebuild(loaded) -> None:
    generator = Generator(*loaded)
    one = generator.generate("Hello", 5, sampler=ArgmaxSampler())
    assert one.startswith("Hello")
    assert Generator(*loaded).generate(["Hello"], 5, sampler=ArgmaxSampler()) == [one]


def test_evaluation(loaded) -> None:
    model = loaded[0]
    ids = prompt(60)
    same = evaluation.kl_divergence(
        model, evaluation.all_logits(model, ids, chunk=32), ids, chunk=32
    )
    assert abs(same.mean) < 1e-3 and same.same_top > 0.9
    assert evaluation.perplexity(model, ids, chunk=32).perplexity > 1
