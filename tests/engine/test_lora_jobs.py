"""Jobs with adapters of their own in one generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3 import ArgmaxSampler, Cache, CacheLayer_quant, Config, Generator, Job, Model, Tokenizer
from exl3.errors import ConfigError, UnsupportedError
from exl3.generator.pages import ROOT, root_key
from exl3.model.lora import LoRA
from tests.engine.test_generator import run, tokens
from tests.model.peft_adapters import PeftAdapter

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"
EVERY = [[], ["a"], ["b"], ["a", "b"]]


@pytest.fixture
def loaded(tmp_path: Path):
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache = Cache(model, 16 * 256)
    model.load()
    paths = {
        name: PeftAdapter(model, seed=seed, size=0.2).save(tmp_path, name)
        for seed, name in enumerate("ab")
    }
    loras = {name: LoRA.from_directory(model, path) for name, path in paths.items()}
    return Generator(model, cache, Tokenizer.from_config(config)), loras


def job(length: int = 300, **kwargs) -> Job:
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (1, length), generator=source)
    return Job(ids, max_new_tokens=5, sampler=ArgmaxSampler(), return_logits=True, **kwargs)


def logits(events: list[dict]) -> torch.Tensor:
    return torch.cat([e["logits"][0] for e in events if "logits" in e])[:, :500]


def reference(model: Model, item: Job, events: list[dict], loras: list[LoRA]) -> torch.Tensor:
    ids = item.sequence.input_ids.torch()
    return model.forward(ids, {"loras": loras})[0, item.prompt_tokens - 1 : -1, :500]


def test_adapters_side_by_side_share_no_pages(loaded) -> None:
    generator, loras = loaded
    jobs = [job(loras=[loras[name] for name in names]) for names in EVERY]
    events = run(generator, *jobs)
    results = []
    for item, names in zip(jobs, EVERY, strict=True):
        out = events[item]
        assert len(tokens(out)) == 5 and out[-1]["cached_tokens"] == 0
        want = reference(generator.model, item, out, [loras[name] for name in names])
        assert float((logits(out) - want).abs().max()) < 0.15
        results.append(logits(out))
    for i, one in enumerate(results):
        for other in results[:i]:
            assert float((one[0] - other[0]).abs().max()) > 0.3
    for names, before in zip(EVERY, results, strict=True):  # again, from the pages of its own kind
        again = job(loras=[loras[name] for name in reversed(names)])
        out = run(generator, again)[again]
        assert out[-1]["cached_tokens"] >= 256
        assert torch.equal(logits(out), before)


def test_adapters_loaded_later_find_no_old_pages(loaded) -> None:
    generator, loras = loaded
    plain = job(loras=[])
    before = logits(run(generator, plain)[plain])
    default = job()  # both adapters, as in every forward pass
    out = run(generator, default)[default]
    assert out[-1]["cached_tokens"] == 0
    assert float((logits(out)[0] - before[0]).abs().max()) > 0.3
    for lora in loras.values():
        lora.unload()
    after = job()
    out = run(generator, after)[after]
    assert out[-1]["cached_tokens"] >= 256 and after.adapter_key == b""
    assert torch.equal(logits(out)[1:], before[1:])


def test_generate_with_adapters(loaded) -> None:
    generator, loras = loaded

    def text(**kwargs) -> str:
        return generator.generate("Hello there", 8, sampler=ArgmaxSampler(), **kwargs)

    plain, both = text(loras=[]), text()
    assert plain != both == text(loras=list(loras.values()))
    assert generator.generate(["Hello there"], 8, sampler=ArgmaxSampler(), loras=[]) == [plain]


def test_unloaded_while_it_runs(loaded) -> None:
    """A job keeps its adapters to its end, and nothing of them stays after it."""
    generator, loras = loaded
    want_job = job(loras=[loras["a"]])
    want = tokens(run(generator, want_job)[want_job])
    item = job(loras=[loras["a"]])
    generator.enqueue(item)
    events = generator.iterate() + generator.iterate()
    loras["a"].unload()
    while generator.num_remaining_jobs():
        events += generator.iterate()
    assert tokens(events) == want and item.adapters == ()
    with pytest.raises(ConfigError, match="not loaded"):
        generator.enqueue(job(loras=[loras["a"]]))
    assert not generator.num_remaining_jobs()


def test_drafted_equals_undrafted(loaded) -> None:
    """Each row of a verified draft has the adapters of its job."""
    generator, loras = loaded
    model, tokenizer = generator.model, generator.tokenizer

    def tokens_of(**options) -> list[list[int]]:
        cache = Cache(model, 16 * 256)
        jobs = [
            Job(
                torch.tensor([[5, 6, 7, 8] * 6]),
                max_new_tokens=40,
                sampler=ArgmaxSampler(),
                loras=[loras[name] for name in names],
            )
            for names in EVERY
        ]
        events = run(Generator(model, cache, tokenizer, **options), *jobs)
        assert all("error" not in out[-1] for out in events.values())
        if options:
            assert any(item.accepted_draft_tokens for item in jobs)
        return [tokens(events[item]) for item in jobs]

    plain = tokens_of()
    assert len({tuple(row) for row in plain}) == 4
    assert tokens_of(ngram_match_min=1, num_draft_tokens=3) == plain


def test_on_a_quantised_cache(loaded) -> None:
    generator, loras = loaded
    cache = Cache(generator.model, 16 * 256, layer_type=CacheLayer_quant, k_bits=8, v_bits=8)
    jobs = [job(loras=[loras[name] for name in names]) for names in EVERY]
    events = run(Generator(generator.model, cache, generator.tokenizer), *jobs)
    for item, names in zip(jobs, EVERY, strict=True):
        want = reference(generator.model, item, events[item], [loras[name] for name in names])
        assert float((logits(events[item]) - want).abs().max()) < 0.2


def test_first_page_depends_on_adapters() -> None:
    assert root_key(b"") == ROOT
    assert len({root_key(b""), root_key(b"a"), root_key(b"b"), ROOT}) == 3


def test_a_model_without_adapters(make) -> None:
    with pytest.raises(UnsupportedError, match="loras"):
        make().enqueue(Job(torch.tensor([[5, 6]]), loras=["a"]))


def test_guidance_runs_both_prompts_with_the_adapters(loaded) -> None:
    generator, loras = loaded
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (1, length), generator=source) for length in (300, 20)]
    options = {"max_new_tokens": 5, "sampler": ArgmaxSampler(), "return_logits": True}
    jobs = [
        Job(prompts, cfg_scale=1.5, loras=[loras[name] for name in names], **options)
        for names in EVERY
    ]
    events = run(generator, *jobs)
    for item, names in zip(jobs, EVERY, strict=True):
        params = {"loras": [loras[name] for name in names]}
        good, bad = (
            generator.model.forward(sequence.input_ids.torch(), params)[0, -6:-1, :500]
            for sequence in item.sequences
        )
        want = bad + 1.5 * (good - bad)
        assert float((logits(events[item]) - want).abs().max()) < 0.4
