"""Every public name resolves, and none of the sampler's is forgotten."""

from __future__ import annotations

import importlib

import pytest

import exl3


@pytest.mark.parametrize("name", exl3.__all__)
def test_export_resolves(name: str) -> None:
    assert getattr(exl3, name) is not None
    assert name in dir(exl3)


def test_sampler_names_are_exported() -> None:
    sampler = importlib.import_module("exl3.generator.sampler")
    own = {name for name in sampler.__all__ if name.startswith("SS_") or name.endswith("Sampler")}
    assert own <= set(exl3.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="bananas"):
        _ = exl3.bananas
