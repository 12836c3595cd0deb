"""Small helpers, and the evaluation on a model made of a table."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch

from exl3 import evaluation
from exl3.util import Timer, prepend_hf_chat_context
from exl3.util.measures import compute_kl_div, compute_target_log_probs, cosine_error, sqnr
from exl3.util.memory import free_mem
from exl3.util.progress import ProgressBar


def test_timer_and_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Timer() as timer:
        time.sleep(0.01)
    assert 0.01 <= timer.interval < 1
    with ProgressBar(None, 3) as bar:
        bar.update(1)
        bar.new_task("next", 4)
    assert capsys.readouterr().out == ""
    with ProgressBar("work", 3) as bar:
        bar.update(3)
    free_mem()


def test_measures() -> None:
    a, b = torch.randn(3, 40), torch.randn(3, 40)
    p, q = b[:, :33].softmax(-1), a[:, :33].softmax(-1)
    torch.testing.assert_close(compute_kl_div(a, b, 33), (p * (p / q).log()).sum(-1))
    assert compute_kl_div(a, a, 33).abs().max() < 1e-6
    ids = torch.tensor([1, 2, 3])
    torch.testing.assert_close(compute_target_log_probs(a, ids, 33).exp(), q[range(3), ids])
    assert cosine_error(a, 2 * a) == pytest.approx(0, abs=1e-12)
    assert sqnr(b * 1.1, b) == pytest.approx(20, abs=1e-4)


class Table:
    """Logits of the next token from a table of (token, next token)."""

    def __init__(self, seed: int) -> None:
        self.config = SimpleNamespace(vocab_size=10)
        self.table = torch.randn(10, 16, generator=torch.Generator().manual_seed(seed))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def test_evaluation_by_hand() -> None:
    a, b = Table(1), Table(2)
    ids = torch.randint(0, 10, (1, 25), generator=torch.Generator().manual_seed(0))
    got = evaluation.perplexity(a, ids, chunk=8)
    log_p = a.table[:, :10].log_softmax(-1)
    pairs = [(i, i + 1) for i in range(24) if (i + 1) % 8]  # chunks do not see each other
    want = -torch.stack([log_p[ids[0, i], ids[0, j]] for i, j in pairs])
    torch.testing.assert_close(got.per_position, want)
    assert got.perplexity == pytest.approx(math.exp(float(want.mean())), rel=1e-5)
    kl = evaluation.kl_divergence(a, b, ids, chunk=8)
    assert kl.per_position.shape == (24,)  # the last chunk is a single token
    assert kl.mean > 0 and 0 <= kl.same_top <= 1
    again = evaluation.kl_divergence(a, evaluation.all_logits(b, ids, chunk=8), ids, chunk=8)
    assert again.mean == pytest.approx(kl.mean, rel=1e-2)
    assert evaluation.kl_divergence(a, a, ids).mean == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError):
        evaluation.perplexity(a, ids[:, :1])


def test_chat_context() -> None:
    tokenizer = SimpleNamespace(hf_chat_template=lambda messages: torch.tensor([[7, 8]]))
    out = prepend_hf_chat_context(tokenizer, torch.tensor([[1], [2]]))
    assert out.tolist() == [[7, 8, 1], [7, 8, 2]]
