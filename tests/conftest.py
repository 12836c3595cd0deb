"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exl3.ops.registry import ops
from exl3.settings import ISA_LEVELS


@pytest.fixture(params=ISA_LEVELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once at every instruction level that this machine has."""
    level = ISA_LEVELS.index(request.param)
    if level > ops().cpu_isa(True):
        pytest.skip(f"this CPU has no {request.param}")
    threads = ops().cpu_threads()
    ops().configure_cpu(threads, level)
    yield request.param
    ops().configure_cpu(threads, len(ISA_LEVELS) - 1)
