"""Wrong kinds of arguments: an error of ours that says what was expected, and nothing left over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from exl3 import (
    SS_DRY,
    SS_XTC,
    ArgmaxSampler,
    Cache,
    ComboSampler,
    Config,
    CustomSampler,
    Generator,
    Job,
    LLGuidanceFilter,
    Model,
    SS_AdaptiveP,
    SS_AllowTokens,
    SS_Argmax,
    SS_BanEOS,
    SS_BanTokens,
    SS_LogitBias,
    SS_Temperature,
    SS_TopK,
    Tokenizer,
    TopKSampler,
)
from exl3.errors import Exl3Error
from tests.engine.test_generator import run
from tests.engine.test_real_model import DIRECTORY

IDS = torch.tensor([[5, 6, 7]])
LONG = {"dtype": torch.long}


@pytest.fixture(scope="module")
def parts():
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache = Cache(model, 1024)
    model.load()
    tokenizer = Tokenizer.from_config(config)
    yield SimpleNamespace(
        config=config,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        generator=Generator(model, cache, tokenizer),
    )
    model.unload()


ARGUMENTS_OF_A_JOB = [
    {"max_new_tokens": "3"},
    {"max_new_tokens": 3.0},
    {"seed": [1]},
    {"seed": "x"},
    {"stop_conditions": 1.5},
    {"stop_conditions": [[1]]},
    {"stop_conditions": {"a": 1}},
    {"stop_conditions": True},
    {"stop_conditions": b"abc"},  # not the ids 97, 98, 99
    {"banned_strings": 5},
    {"banned_strings": [5]},
    {"return_top_tokens": -1},
    {"return_top_tokens": "5"},
    {"embeddings": "x"},
    {"embeddings": 5},
    {"stop_on_loop": "ab"},
    {"stop_on_loop": (9.5, 2)},
    {"stop_on_loop": 5},
]


@pytest.mark.parametrize("wrong", ARGUMENTS_OF_A_JOB, ids=str)
def test_arguments_of_a_job(parts, wrong) -> None:
    with pytest.raises(Exl3Error, match=next(iter(wrong))):
        parts.generator.enqueue(Job(IDS, **{"max_new_tokens": 3, **wrong}))
    assert parts.generator.num_remaining_jobs() == 0


@pytest.mark.parametrize(
    "ids",
    [
        None,
        "hello",
        [1, 2, 3],
        [],
        torch.zeros(1, 3),
        torch.zeros(1, 3, 1, **LONG),
        torch.ones(1, 3, dtype=torch.bool),
    ],
    ids=str,
)
def test_ids(ids) -> None:
    with pytest.raises(Exl3Error, match=r"input_ids|one sequence"):
        Job(ids)
    with pytest.raises(Exl3Error, match=r"input_ids|one sequence"):
        Job(IDS).constrain_output_now(ids)


def test_forced_ids_are_checked_before_they_reach_the_batch(parts) -> None:
    """One job's mistake must not end the others."""
    good = Job(IDS, max_new_tokens=4)
    for wrong in (-1, 512, 10**9):
        early, late = Job(IDS, max_new_tokens=4), Job(IDS, max_new_tokens=4)
        early.constrain_output_now(torch.tensor([[wrong]]))
        with pytest.raises(Exl3Error, match=str(wrong)):
            parts.generator.enqueue(early)
        parts.generator.enqueue(late)
        with pytest.raises(Exl3Error, match=str(wrong)):
            late.constrain_output_now(torch.tensor([[7, wrong]]))
        parts.generator.cancel(late)
    assert run(parts.generator, good)[good][-1]["new_tokens"] == 4


CALLS = {
    "generate(None)": lambda p: p.generator.generate(None, 3),
    "generate(5)": lambda p: p.generator.generate(5, 3),
    "generate(ids)": lambda p: p.generator.generate([1, 2], 3),
    "generate, negative": lambda p: p.generator.generate("a", 3, negative_prompt=5, cfg_scale=2),
    "generate, scale": lambda p: p.generator.generate("a", 3, negative_prompt="b", cfg_scale="2"),
    "generate, sampler": lambda p: p.generator.generate("a", 3, sampler="greedy"),
    "generate, samplers": lambda p: p.generator.generate(["a", "b"], 3, sampler=[ArgmaxSampler()]),
    "generate, filters": lambda p: p.generator.generate("a", 3, filters="json"),
    "cancel(None)": lambda p: p.generator.cancel(None),
    "cancel(str)": lambda p: p.generator.cancel("x"),
    "encode(None)": lambda p: p.tokenizer.encode(None),
    "encode(5)": lambda p: p.tokenizer.encode(5),
    "encode(bytes)": lambda p: p.tokenizer.encode(b"ab"),
    "encode([None])": lambda p: p.tokenizer.encode([None]),
    "decode(5)": lambda p: p.tokenizer.decode(5),
    "decode(None)": lambda p: p.tokenizer.decode(None),
    "decode(str)": lambda p: p.tokenizer.decode(["ab"]),
    "num_tokens(None)": lambda p: p.tokenizer.num_tokens(None),
    "from_directory(None)": lambda p: Config.from_directory(None),
    "from_directory(5)": lambda p: Config.from_directory(5),
    "from_directory(missing)": lambda p: Config.from_directory("nope"),
    "layer_map": lambda p: Config.from_directory(p.config.directory, layer_map="x"),
    "component None": lambda p: Model.from_config(p.config, None),
    "component vision": lambda p: Model.from_config(p.config, component="vision"),
    "forward(None)": lambda p: p.model.forward(None),
    "forward(list)": lambda p: p.model.forward([1, 2]),
    "forward(float)": lambda p: p.model.forward(torch.zeros(1, 3)),
    "forward, params": lambda p: p.model.forward(IDS, "x"),
    "prefill, params": lambda p: p.model.prefill(IDS, "x"),
    "layer_type": lambda p: Cache(p.model, 256, layer_type="fp16"),
    "steps None": lambda p: CustomSampler(None),
    "steps, one": lambda p: CustomSampler(SS_Argmax()),
    "bias list": lambda p: SS_LogitBias([1, 2]),
    "bias None": lambda p: SS_LogitBias(None),
    "bias of a text": lambda p: SS_LogitBias({"a": 1.0}),
    "ban 5": lambda p: SS_BanTokens(5),
    "ban text": lambda p: SS_BanTokens("ab"),
    "allow None": lambda p: SS_AllowTokens(None),
    "ban EOS of None": lambda p: SS_BanEOS(None),
    "breakers 5": lambda p: SS_DRY(1.0, sequence_breakers=5),
    "protected 5": lambda p: SS_XTC(0.5, 0.1, 5),
    "target": lambda p: SS_AdaptiveP("x"),
    "temperature None": lambda p: SS_Temperature(None),
    "combo temperature": lambda p: ComboSampler(temperature=None),
    "top_k text": lambda p: SS_TopK("a"),
    "top_k 1.5": lambda p: TopKSampler(1.5),
    "filter without tokenizer": lambda p: LLGuidanceFilter(None, regex="a"),
    "trigger text": lambda p: LLGuidanceFilter(p.tokenizer, trigger_token="x", regex="a"),
    "interval": lambda p: Generator(
        p.model, p.cache, p.tokenizer, recurrent_checkpoint_interval=100
    ),
    "drafter": lambda p: Generator(
        p.model, p.cache, p.tokenizer, draft_model="x", draft_cache=p.cache
    ),
    "another model's cache": lambda p: Generator(
        p.model, Cache(Model.from_config(p.config), 256), p.tokenizer
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls(parts, call: str) -> None:
    with pytest.raises(Exl3Error) as caught:
        CALLS[call](parts)
    assert len(str(caught.value)) > 20  # says something
    assert not parts.generator.retired and parts.generator.num_remaining_jobs() == 0
