"""A short soak on a tiny model; `python -m tests.soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.__main__ import Plan, run

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"


@pytest.mark.slow
@pytest.mark.parametrize("ngram", [0, 2])
def test_soak(ngram: int) -> None:
    plan = Plan(
        DIRECTORY,
        seconds=20,
        clients=32,
        cache_tokens=4096,
        longest=900,
        ngram=ngram,
        max_gap=0.25,
        max_growth=64 << 20,
    )
    figures = run(plan)
    assert not figures["faults"]
    assert figures["finished"] > 50 and figures["cancelled"] > 10
    assert figures["engine"]["host_hits"] + figures["engine"]["disk_hits"] > 0
    assert figures["equal"] == figures["compared"] > 0
