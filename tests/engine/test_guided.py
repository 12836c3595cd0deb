"""Grammars through llguidance on a small model."""

from __future__ import annotations

import json
import re

import pytest
import torch

from exl3 import Cache, Config, Generator, Job, Model, Tokenizer
from exl3.errors import ConfigError
from exl3.generator import LLGuidanceFilter
from exl3.generator.sampler import (
    ArgmaxSampler,
    CategoricalSampler,
    CustomSampler,
    DefaultSampler,
    SS_LogitBias,
    SS_Sample,
)
from tests.engine.test_generator import job, run, text, tokens
from tests.engine.test_real_model import DIRECTORY

pytest.importorskip("llguidance", reason="needs the guided extra")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "foo bar"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def generator() -> Generator:
    config = Config.from_directory(str(DIRECTORY))
    model = Model.from_config(config)
    cache = Cache(model, 4096)
    model.load()
    return Generator(model, cache, Tokenizer.from_config(config))


def ids(generator: Generator, prompt: str = "Hello") -> list[int]:
    return generator.tokenizer.encode(prompt)[0].tolist()


def guided(generator: Generator, *, filter_options=None, **options):
    """Text and last event of a job under a grammar; the pages stay whole."""
    own = {"eos_after_completed": True, **(filter_options or {})}
    filters = [LLGuidanceFilter(generator.tokenizer, **own)]
    options.setdefault("max_new_tokens", 300)
    options.setdefault("sampler", CategoricalSampler(1.5))
    item = job(ids(generator), filters=filters, **options)
    events = run(generator, item)[item]
    return text(events), events[-1]


def check_person(said: str) -> None:
    value = json.loads(said)
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 8 and 0 <= value["age"] <= 99
    assert set(value["tags"]) <= {"a", "bb", "foo bar"} and len(value["tags"]) <= 3


@pytest.mark.parametrize("scale", [0.0, 2.0, 50.0])
def test_a_schema_is_kept_with_a_negative_prompt(generator, scale: float) -> None:
    filter = LLGuidanceFilter(generator.tokenizer, json_schema=PERSON, eos_after_completed=True)
    prompts = [torch.tensor([ids(generator, prompt)]) for prompt in ("Hello", "No!")]
    item = Job(
        prompts,
        cfg_scale=scale,
        filters=[filter],
        banned_strings=["bb", "1"],
        max_new_tokens=300,
        sampler=CategoricalSampler(1.5),
        seed=1,
    )
    said = text(run(generator, item)[item])
    check_person(said)
    assert "bb" not in said and "1" not in said


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rq", [None, 20])
def test_a_schema_is_kept_at_any_temperature(generator, seed: int, rq) -> None:
    said, last = guided(
        generator, filter_options={"json_schema": PERSON}, seed=seed, max_rq_tokens=rq
    )
    assert last["eos_reason"] == "end_filter" and last["full_completion"] == said
    check_person(said)


def test_jobs_with_and_without_grammars_in_one_batch(generator) -> None:
    plain = [job(ids(generator, p), max_new_tokens=30) for p in ("Hello", "Once")]
    alone = [
        text(run(generator, job(ids(generator, p), max_new_tokens=30)).popitem()[1])
        for p in ("Hello", "Once")
    ]
    both = [
        job(
            ids(generator, "Hello"),
            filters=[LLGuidanceFilter(generator.tokenizer, eos_after_completed=True, **grammar)],
            sampler=CategoricalSampler(1.2),
            max_new_tokens=300,
            seed=i,
        )
        for i, grammar in enumerate([{"json_schema": PERSON}, {"regex": "[0-9]{20}"}])
    ]
    events = run(generator, plain[0], both[0], plain[1], both[1])
    check_person(text(events[both[0]]))
    assert re.fullmatch("[0-9]{20}", text(events[both[1]]))
    assert [text(events[item]) for item in plain] == alone


@pytest.mark.parametrize("favourite", [" ", "\n", "\t", " \n"])
def test_white_space_is_bounded(generator, favourite: str) -> None:
    """A model that loves white space still comes to the end."""
    pieces = generator.tokenizer.get_id_to_piece_list()
    blank = {i: 60.0 for i, piece in enumerate(pieces) if piece and not piece.strip(favourite)}
    assert blank
    said, last = guided(
        generator,
        filter_options={"json_schema": PERSON},
        sampler=CustomSampler([SS_LogitBias(blank), SS_Sample()]),
        max_new_tokens=600,
    )
    assert last["eos_reason"] == "end_filter"
    check_person(said)
    assert not re.search(r"\s{22}|\n\s*\n|\t", said)


def test_usual_layouts_are_allowed(generator) -> None:
    """Compact, with spaces and indented JSON."""
    value = {"name": "x", "age": 5, "tags": ["a", "bb"]}
    layouts = [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}]
    for options in layouts:
        matching = LLGuidanceFilter(generator.tokenizer, json_schema=PERSON)
        matching.reset()
        for token in ids(generator, json.dumps(value, **options)):
            matching.accept_token(token)
        assert matching.is_completed()


def test_a_schema_may_choose_its_white_space(generator) -> None:
    compact = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}, **PERSON}
    for seed in range(3):
        said, _ = guided(generator, filter_options={"json_schema": compact}, seed=seed)
        assert said == json.dumps(json.loads(said), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    "bad",
    [
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"lark_grammar": "start: nope"},
        {"lark_grammar": "start: (("},
        {"lark_grammar": ""},
        {"gbnf_grammar": "root ::= nope"},
        {"gbnf_grammar": "((("},
        {"json_schema": "{"},
        {"json_schema": "[1, 2]"},
        {"json_schema": {"type": "nonsense"}},
        {"json_schema": {"$ref": "#/definitions/none"}},
        {"json_schema": {"type": "string", "pattern": "("}},
        {"json_schema": {"not": {"type": "string"}}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"json_schema": {1, 2}},
        {"llg_grammar": "{}"},
        {"llg_grammar": "nonsense"},
    ],
)
def test_what_does_not_compile_is_an_error(generator, bad) -> None:
    """Never a job that runs unconstrained. A server tells it from other faults by ValueError."""
    with pytest.raises(ConfigError, match="LLGuidanceFilter: bad"):
        LLGuidanceFilter(generator.tokenizer, **bad)


@pytest.mark.parametrize("step", [None, 10])
def test_banned_strings_inside_a_grammar(generator, step) -> None:
    """The grammar is taken back with the text, more than once."""
    schema = {"enum": ["foo bar", "foo baz", "other", "food"]}
    seen = set()
    for seed in range(8):
        said, last = guided(
            generator,
            filter_options={"json_schema": schema},
            banned_strings=["foo ba", "food"],
            seed=seed,
            max_rq_tokens=step,
        )
        assert last["eos_reason"] == "end_filter"
        seen.add(said)
    assert seen == {'"other"'}


def test_rollback_is_replay(generator) -> None:
    filter = LLGuidanceFilter(generator.tokenizer, json_schema=PERSON)
    sequence = ids(generator, '{"name":"abc","age":12,"tags":["bb"]}')
    item = job(ids(generator), filters=[filter])
    generator.enqueue(item)
    masks = []
    for token in sequence[:-1]:
        masks.append(filter.get_next_logit_mask())
        assert filter.feed(token) is False
    for at in (len(masks) - 1, len(masks) - 3, len(masks) // 2, 1, 0):
        filter.rewind(len(filter._journal) - at)
        assert torch.equal(filter.get_next_logit_mask(), masks[at])
    generator.cancel(item)


def test_trigger_and_prefix(generator) -> None:
    trigger = generator.tokenizer.encode("a")[0, -1].item()
    filter = LLGuidanceFilter(generator.tokenizer, trigger, regex="[0-9]{4}")
    item = job(
        ids(generator), filters=[filter], max_new_tokens=40, sampler=DefaultSampler(), seed=3
    )
    item.constrain_output_now(torch.tensor([[trigger]]))
    said = text(run(generator, item)[item])
    assert re.match("a[0-9]{4}", said)
    prefixed = {"regex": "id-[a-f]{3}", "prefix_str": "id-", "consume_prefix": True}
    said, last = guided(generator, filter_options=prefixed)
    assert re.fullmatch("[a-f]{3}", said) and last["eos_reason"] == "end_filter"


def test_end_of_text_only_where_the_grammar_may_end(generator) -> None:
    """EOS is masked inside the grammar, and allowed where it may end or go on."""
    eos = generator.tokenizer.config.eos_token_id_list
    loves_eos = CustomSampler([SS_LogitBias({i: 80.0 for i in eos}), SS_Sample()])
    grammar = {"regex": "[a-z]{5,9}"}
    said, last = guided(
        generator, filter_options=grammar, sampler=loves_eos, stop_conditions=list(eos)
    )
    assert re.fullmatch("[a-z]{5,8}", said) and last["eos_reason"] == "stop_token"
    said, last = guided(generator, filter_options=grammar, sampler=loves_eos)
    assert last["eos_reason"] == "end_filter" and re.match("[a-z]{5}", said)
    assert last["new_tokens"] < 9


@pytest.mark.parametrize("eos", [[], [600], [1, 400, None], [2]])
def test_whatever_ends_a_text(generator, eos) -> None:
    """No EOS, one that the tokenizer does not have, several: the vocabulary is made anew."""
    config = Config.from_directory(str(DIRECTORY))
    tokenizer = Tokenizer.from_config(config)
    config.eos_token_id_list[:], tokenizer.eos_token_id = eos, None
    filter = LLGuidanceFilter(tokenizer, regex="a?")
    filter.reset()
    words = filter.get_next_logit_mask()[0].tolist()
    allowed = {i for i in range(512) if words[i >> 5] >> (i & 31) & 1}
    known = {i for i in eos if i is not None and i < 512} or {1}
    assert allowed == known | {tokenizer.single_id("a")}


def test_captures(generator) -> None:
    filter = LLGuidanceFilter(
        generator.tokenizer,
        eos_after_completed=True,
        lark_grammar='start: "k=" value\nvalue[capture]: /[0-9]{3}/',
    )
    item = job(ids(generator), filters=[filter], max_new_tokens=50)
    said = text(run(generator, item)[item])
    assert filter.get_captures()["value"] == said[2:].encode()


@pytest.mark.parametrize("sampler", [ArgmaxSampler(), CategoricalSampler(1.3)])
def test_drafts_change_nothing(generator, sampler) -> None:
    """n-gram drafts under a grammar: refused where it forbids them, same tokens as without."""
    schema = {"type": "array", "items": {"enum": ["same", "sane"]}, "minItems": 12, "maxItems": 12}
    model, cache, tokenizer = generator.model, generator.cache, generator.tokenizer

    def said(maker: Generator) -> list[int]:
        filter = LLGuidanceFilter(tokenizer, eos_after_completed=True, json_schema=schema)
        item = job(ids(generator), filters=[filter], max_new_tokens=400, sampler=sampler, seed=5)
        return tokens(run(maker, item)[item])

    without = said(Generator(model, Cache(model, 2048), tokenizer))
    drafting = Generator(model, Cache(model, 2048), tokenizer, ngram_match_min=2)
    assert said(drafting) == without and len(without) > 40
    assert cache.model is model
