from __future__ import annotations

import pytest

from exl3.generator import Generator
from tests.engine.fake import FakeCache, FakeModel


@pytest.fixture
def make():
    """A generator on the fake model; checks its page table at the end of the test."""
    made = []

    def make(pages: int = 8, model: FakeModel | None = None, **kwargs) -> Generator:
        model = model or FakeModel(letters=b"abcdef \n")
        generator = Generator(model, FakeCache(model, pages * 256), model.tokenizer, **kwargs)
        made.append(generator)
        return generator

    yield make
    for generator in made:
        generator.check_integrity()
