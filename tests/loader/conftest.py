"""Fixtures of the loader tests."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

# The `gguf` extra is not on every machine.
collect_ignore = [] if importlib.util.find_spec("gguf") else ["test_gguf.py"]


@pytest.fixture
def limit() -> Callable[[int, int], AbstractContextManager[None]]:
    """`limit(resource.RLIMIT_..., value)` caps this process inside a `with` block."""

    @contextmanager
    def capped(kind: int, value: int) -> Iterator[None]:
        old = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(kind, old)

    return capped
