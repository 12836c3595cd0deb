"""The list of calls that a server makes, end to end on a tiny model; keys of every event."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl3.generator.sampler import ArgmaxSampler
from tests.engine.fake import FakeModel
from tests.engine.tabby_scenario import scenario
from tests.engine.test_generator import job, prompt, run
from tests.engine.test_stream import letters, say
from tests.unit.conformance_table import EVENT_KEYS

ROOT = Path(__file__).parents[2]
BASE = {"job", "stage", "eos", "serial"}


def test_a_server_under_our_name() -> None:
    asyncio.run(scenario("exl3"))


def test_a_server_under_the_alias() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tabby_scenario", "exllamav3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def keys(*names: str) -> set[str]:
    return BASE.union(*(EVENT_KEYS[name].split() for name in names))


@pytest.mark.parametrize("identifier", [None, 0, ("a", 1)])
def test_keys_of_every_event(make, identifier) -> None:
    generator = make()
    item = job(
        prompt(300),
        max_new_tokens=3,
        identifier=identifier,
        return_probs=True,
        return_top_tokens=2,
        return_logits=True,
    )
    events = run(generator, item)[item]
    own = set() if identifier is None else {"identifier"}
    assert [set(event) - own for event in events] == [
        keys("started"),
        keys("prefill"),
        keys("streaming"),
        keys("streaming"),
        keys("streaming", "eos"),
    ]
    assert all(event.get("identifier") == identifier for event in events)
    shapes = {"token_ids": (1, 1), "token_probs": (1, 1), "top_k_tokens": (1, 1, 2)}
    for key, shape in shapes.items():
        assert events[-1][key].shape == shape
    assert events[-1]["token_ids"].dtype == events[-1]["top_k_tokens"].dtype == torch.long
    assert events[-1]["logits"].shape == (1, 1, FakeModel().width)
    assert events[-1]["logits"].dtype == torch.float32


@pytest.mark.parametrize(
    ("reason", "script", "options"),
    [
        ("stop_token", [*letters("ab"), 1], {"stop_conditions": [1], "max_new_tokens": 9}),
        ("stop_string", letters("ab stop"), {"stop_conditions": ["stop"], "max_new_tokens": 9}),
        ("max_new_tokens", letters("abcd"), {}),
        ("loop_detected", letters("abababababab"), {"stop_on_loop": (6, 2)}),
    ],
)
def test_keys_of_every_end(make, reason: str, script, options) -> None:
    last = say(make, script, **options)[-1]
    plain = {"text", "token_ids"}
    assert set(last) | plain == keys("eos", reason) | plain
    assert last["eos_reason"] == reason and last["eos"] is True


def test_keys_of_a_cut(make) -> None:
    events = say(make, letters("ab foo"), banned_strings=["foo"], sampler=ArgmaxSampler())
    cut = [event for event in events if "suppressed_text" in event]
    assert [set(event) for event in cut] == [keys("banned")]
