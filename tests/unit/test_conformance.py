"""Everything that the interface page names is there: names, order, defaults, keys, flags.

The names come from `conformance_table`. Features that this version refuses (`UnsupportedError`)
must still be there by name.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import exl3
from exl3.errors import ConfigError
from exl3.model.reader import NO_DEFAULT
from exl3.settings import Settings
from tests.unit import conformance_table as table

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "fixtures" / "golden" / "tiny_llama_exl3"


def module_of(path: str) -> Any:
    return importlib.import_module(f"exl3.{path}" if path else "exl3")


def resolve(path: str) -> Any:
    """An object by its path below the package: modules first, then attributes."""
    parts, found = path.split("."), exl3
    for i, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(["exl3", *parts[: i + 1]]))
    return found


def test_absent() -> None:
    for path in table.ABSENT:
        with pytest.raises((AttributeError, ImportError)):
            resolve(path)


@pytest.mark.parametrize("path", sorted(table.EXPORTS.keys() - table.ABSENT))
def test_exports(path: str) -> None:
    module = module_of(path)
    missing = [name for name in table.EXPORTS[path].split() if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("name", table.ERRORS)
def test_errors(name: str) -> None:
    errors = vars(exl3.errors)
    builtins = vars(importlib.import_module("builtins"))
    for base in table.ERRORS[name].split():
        assert issubclass(errors[name], errors.get(base) or builtins[base])


def parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.name not in ("self", "cls")]


@pytest.mark.parametrize("path", sorted(table.SIGNATURES.keys() - table.ABSENT))
def test_signature(path: str) -> None:
    words = " ".join(table.SIGNATURES[path].split())
    want = eval(f"lambda {words}: 0", {"NO_DEFAULT": NO_DEFAULT})
    target = resolve(path)
    got = parameters(inspect.signature(target))
    if isinstance(target, type):
        got = parameters(
            inspect.signature(target.__init__ if "__init__" in vars(target) else target)
        )
    names = [p.name for p in got]
    placed = [p for p in got if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    starred = {p.kind for p in got}
    for place, parameter in enumerate(parameters(inspect.signature(want))):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            assert parameter.kind in starred, f"{path}: no {parameter}"
            continue
        if parameter.name.startswith("_"):
            assert len(placed) > place, f"{path}: no argument {place}"
            continue
        assert parameter.name in names, f"{path}: no {parameter.name}"
        found = got[names.index(parameter.name)]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert placed[place].name == parameter.name, f"{path}: {parameter.name} out of place"
        default = found.empty if parameter.default is ... else parameter.default
        if default is found.empty:
            assert found.default in (found.empty, NO_DEFAULT), f"{path}: {parameter.name}"
        else:
            same = type(found.default) is type(default) or default is None
            assert found.default == default and same, f"{path}: {parameter.name}"
    for extra in placed[len(parameters(inspect.signature(want))) :]:
        assert extra.default is not extra.empty, f"{path}: {extra.name} is required"


class AnyFilter(exl3.Filter):
    """The least that a filter must define."""

    reset = accept_token = get_next_logit_mask = is_completed = lambda self, *_: None  # type: ignore


class Look(exl3.SS_Base):
    """Keeps the state that a custom step sees."""

    def run(self, state: Any) -> None:
        self.seen = state


@pytest.fixture(scope="module")
def objects() -> Any:
    """One of each object that programs hold, on a tiny model."""
    config = exl3.Config.from_directory(str(TINY))
    model = exl3.Model.from_config(config)
    cache = exl3.Cache(model, 2048)
    model.load()
    tokenizer = exl3.Tokenizer.from_config(config)
    generator = exl3.Generator(model, cache, tokenizer)
    job = exl3.Job(torch.tensor([[5, 6, 7]]), max_new_tokens=1)
    look = Look()
    sampler = exl3.CustomSampler([look, exl3.SS_Argmax()])
    sampler.forward(torch.zeros(1, 1, 512))
    yield SimpleNamespace(
        config=config,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        generator=generator,
        job=job,
        sampler=sampler,
        state=look.seen,
        filter=AnyFilter(tokenizer, None, None, False),
        embedding=exl3.MMEmbedding(torch.zeros(3, 8), token_string=torch.tensor([[5, -1, -1, -1]])),
    )
    model.unload()


@pytest.mark.parametrize("path", table.ATTRIBUTES)
def test_attributes(objects: Any, path: str) -> None:
    target = eval(path, vars(objects).copy())
    missing = [name for name in table.ATTRIBUTES[path].split() if not hasattr(target, name)]
    assert not missing


def test_values_that_programs_compare(objects: Any) -> None:
    assert exl3.constants.PAGE_SIZE == 256
    assert {state.name for state in exl3.generator.sampler.SS} == set(table.SS_STATES.split())
    assert "text" in objects.config.model_classes and "mtp" not in objects.config.model_classes
    assert type(objects.model.caps) is dict
    assert objects.generator.recurrent_cache is None and objects.generator.cpu_page_cache is None
    assert objects.generator.recurrent_checkpoint_interval == 2048
    assert objects.generator.pagetable.max_pages == 8
    assert objects.filter.logits_dtype is torch.float16 and objects.filter.use_background_worker()
    assert exl3.GreedySampler is exl3.ArgmaxSampler
    assert exl3.GumbelSampler is exl3.CategoricalSampler
    pieces = objects.tokenizer.get_id_to_piece_list(True)
    assert pieces is objects.tokenizer.get_id_to_piece_list(True)
    assert len(pieces) == objects.tokenizer.actual_vocab_size


def flags_of(parser: ArgumentParser) -> dict[str, Any]:
    return {flag: action for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("flags", table.MODEL_FLAGS)
def test_model_flags(flags: str) -> None:
    parser = ArgumentParser(allow_abbrev=False)
    exl3.model_init.add_args(parser, add_sampling_args=True, add_draft_model_args=True)
    kind, default = table.MODEL_FLAGS[flags]
    known = flags_of(parser)
    actions = [known[flag] for flag in flags.split()]
    assert actions[0] is actions[-1] and actions[0].dest == flags.split()[-1].lstrip("-")
    assert (actions[0].type, actions[0].default) == (kind, default)
    assert actions[0].required == (flags == "-m --model_dir")


def test_convert_flags() -> None:
    from exl3.conversion.arguments import given_values, with_defaults
    from exl3.conversion.convert_model import parser

    known = flags_of(parser)
    for flags in table.CONVERT_FLAGS.split(","):
        actions = [known[flag] for flag in flags.split()]
        assert actions[0] is actions[-1]
    args = parser.parse_args(["-i", "a", "-o", "b", "-w", "c", "-b", "4"])
    values = with_defaults(given_values(args))
    assert {name: values[name] for name in table.CONVERT_DEFAULTS} == table.CONVERT_DEFAULTS
    with pytest.raises(ConfigError, match="unrecognized"):
        parser.parse_args(["--bit", "4"])


def test_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    chat, modes, commands = map(importlib.import_module, ("chat", "chat_modes", "chat_commands"))
    parser = chat.make_parser()
    known = flags_of(parser)
    assert not parser.allow_abbrev
    for flags, default in table.CHAT_FLAGS.items():
        actions = [known[flag] for flag in flags.split()]
        assert actions[0] is actions[-1] and actions[0].default == default, flags
    assert set(table.MODEL_FLAGS) <= {" ".join(action.option_strings) for action in parser._actions}
    assert set(table.CHAT_MODES.split()) <= set(modes.MODES)
    source = inspect.getsource(commands)
    missing = {name for name in table.CHAT_COMMANDS.split() if f'"{name}"' not in source}
    assert not missing


@pytest.mark.parametrize("name", table.SETTINGS.split())
@pytest.mark.parametrize("value", ["0", "1"])
def test_an_old_shell_profile_does_not_stop_a_start(name: str, value: str) -> None:
    Settings.from_environment({name: value})


ALIAS = """
import importlib, sys
from exl3.compat import install_alias
install_alias()
from tests.unit import conformance_table as table
for path, names in table.EXPORTS.items():
    if path == "version" or path in table.ABSENT:
        continue
    end = "." + path if path else ""
    alias, own = (importlib.import_module(root + end) for root in ("exllamav3", "exl3"))
    for name in names.split():
        assert getattr(alias, name) is getattr(own, name), (path, name)
    if path:
        assert alias is own, path
"""


def test_the_alias_has_the_same_objects() -> None:
    done = subprocess.run([sys.executable, "-c", ALIAS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
