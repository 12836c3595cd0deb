"""Fixtures of the tokenizer tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import KINDS, FakeConfig, Make
from tokenizers import AddedToken

from exl3.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def hf_tokenizers() -> dict[str, str]:
    """tokenizer.json text of every kind, with an added token that is not special."""
    built = {name: build() for name, build in KINDS.items()}
    for tokenizer in built.values():
        tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return {name: tokenizer.to_str() for name, tokenizer in built.items()}


@pytest.fixture
def make(tmp_path: Path, hf_tokenizers: dict[str, str]) -> Make:
    """`make(kind, tokenizer_config={}, ..., **config)`: write the files and open them."""

    def build(
        kind: str = "byte_level",
        *,
        tokenizer_config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        **config: Any,
    ) -> Tokenizer:
        (tmp_path / "tokenizer.json").write_text(hf_tokenizers[kind])
        if tokenizer_config is None:
            tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return Tokenizer.from_config(FakeConfig(str(tmp_path), **config))

    return build
