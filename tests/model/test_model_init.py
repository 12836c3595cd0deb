"""Shared command-line arguments."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import GOLDEN

from exl3 import Config, Tokenizer, model_init
from exl3.errors import ConfigError, UnsupportedError
from exl3.sampling.arguments import MORE_DEFAULTS

TINY = str(GOLDEN / "tiny_llama_exl3")


def parse(*words: str, **options: Any) -> Any:
    parser = ArgumentParser(allow_abbrev=False)
    model_init.add_args(parser, **options)
    return parser.parse_args(["-m", TINY, *words])


def test_init_without_and_with_draft(capsys: pytest.CaptureFixture[str]) -> None:
    found = model_init.init(parse("-cs", "512", "-lm"), load_tokenizer=False, progress=False)
    model, config, cache, tokenizer = found
    assert model.loaded and config.directory == TINY and tokenizer is None
    assert cache.max_num_tokens == 512 and len(cache.get_all_tensors()) == 6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith(" -- ") for line in lines)
    assert len(model_init.init(parse(cache=False), quiet=True)) == 4
    assert capsys.readouterr().out == ""
    args = parse(add_draft_model_args=True)
    assert model_init.init(args, quiet=True)[4:] == (None, None, None)


def test_draft_model(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((GOLDEN / "tiny_llama_exl3" / name).read_bytes())
    args = parse("-dm", str(tmp_path), "-ndt", "5", add_draft_model_args=True)
    *_, draft, draft_config, draft_cache = model_init.init(args, quiet=True, min_draft_len=3)
    assert draft.loaded and draft_config.directory == str(tmp_path)
    assert draft_cache.max_num_tokens == 8192 and draft_cache.max_history == 5


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["-tp"], UnsupportedError, "tensor_p"),
        (["-cq", "9"], ConfigError, "k_bits must be 2 to 8, got 9"),
        (["-cq", "4", "-cca", "0.5"], UnsupportedError, "compand_a"),
        (["-cq", "4,x"], ConfigError, "-cq"),
        (["-gs", "a,b"], ConfigError, "-gs"),
        (["-tp", "-mcl", "3"], ConfigError, "-mcl"),
        (["-mtp"], ConfigError, "mtp"),
        (["-mtp", "-dm", "x"], ConfigError, "-mtp"),
        (["-dm", TINY], ConfigError, "mtp"),
        (["-dmcl", "2"], ConfigError, "drafter"),
        (["-or", "absent.yml"], ConfigError, "absent.yml"),
        (["-cs", "300"], ConfigError, "256"),
    ],
    ids=str,
)
def test_refusals(words: list[str], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        model_init.init(parse(*words, add_draft_model_args=True), quiet=True)


def test_override(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(GOLDEN / "tiny_llama_exl3" / "model.safetensors")
    key = "model.layers.1.input_layernorm.weight"
    save_file(
        {key: tensors[key] * 2, "model.norm.weight": tensors["model.norm.weight"] * 3},
        other / "model.safetensors",
    )
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"sources:\n- {{id: a, model_dir: {other}}}\n"
        "overrides:\n- {key: 'model.layers.*', source: a}\n"
    )
    model = model_init.init(parse("-or", str(recipe)), quiet=True, load_tokenizer=False)[0]
    assert torch.equal(model.find_module(key.removesuffix(".weight")).weight, tensors[key] * 2.0)
    assert torch.equal(model.final_norm.weight, tensors["model.norm.weight"].float())


def test_sampling_arguments() -> None:
    args = parse(
        "-temp", "0.5", "-penr", "64", add_sampling_args=True, default_sampling_args={"min_p": 0.2}
    )
    assert (args.temperature, args.min_p, args.top_p, args.penalty_range) == (0.5, 0.2, 1.0, 64)
    assert not args.temperature_first
    model_init.get_arg_sampler(args)
    with pytest.raises(ConfigError, match="tempature"):
        parse(add_sampling_args=True, default_sampling_args={"tempature": 1})


def chain(*words: str, tokenizer=None) -> list[str]:
    sampler = model_init.get_arg_sampler(parse(*words, add_sampling_args=True), tokenizer)
    return [type(step).__name__ for step in sampler.steps]


def test_more_sampling_arguments() -> None:
    plain = ["SS_MinP", "SS_Temperature", "SS_Sample"]
    assert chain() == plain
    for words, name in {
        "-typ 0.9": "SS_TypicalP",
        "-topa 0.2": "SS_TopA",
        "-nsigma 1": "SS_TopNSigma",
        "-xtcp 0.5": "SS_XTC",
        "-drym 0.8 -drysb 1 2": "SS_DRY",
        "-smf 0.3 -smc 1.5": "SS_Smoothing",
        "-allow 1 2": "SS_AllowTokens",
        "-dynmin 0.5 -dynmax 1.5": "SS_DynaTemp",
        "-miro 2 -mtau 3": "SS_Mirostat",
    }.items():
        if "drysb" in words:
            with pytest.raises(ConfigError, match="tokenizer"):
                chain(*words.split())
            words = "-drym 0.8"
        got = chain(*words.split())
        assert set(got) - set(plain) == {name}
    tokenizer = Tokenizer.from_config(Config.from_directory(TINY))
    assert chain("-ban_eos", tokenizer=tokenizer)[0] == "SS_BanEOS"
    for words in ("-ban_eos", "-miro 1", "-temp -1", "-typ 2"):
        with pytest.raises(ConfigError, match=r"-ban_eos|-miro|-temp|typical_p"):
            chain(*words.split())


def test_a_program_with_a_parser_of_its_own() -> None:
    args = parse(add_sampling_args=True)
    for name in MORE_DEFAULTS:
        delattr(args, name)
    assert len(model_init.get_arg_sampler(args).steps) == 3


def test_defaults() -> None:
    args = parse(
        default_cache_size=4096,
        default_autosplit_max_batch_size=3,
        default_recurrent_cache_size=1.5,
        add_draft_model_args=True,
    )
    assert (args.cache_size, args.autosplit_max_batch_size) == (4096, 3)
    assert (args.recurrent_cache_size, args.cpu_cache_size) == (1.5, 0.0)
    assert (args.ngram_match_min, args.draft_skip_ema, args.num_draft_tokens) == (0, 0.3, None)
    assert args.tp_max_parallelism_attn is None and args.gpu_split is None
