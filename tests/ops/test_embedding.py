"""embedding against plain torch, at every instruction level."""

import pytest
import torch

from exl3.ops.embedding import embedding, embedding_reference
from exl3.ops.graph import record


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "dim"), [(0, 64), (1, 576), (7, 33), (130, 512)])
def test_matches_reference(isa: str, dtype: torch.dtype, m: int, dim: int) -> None:
    torch.manual_seed(0)
    table = (torch.randn(50, dim) * 10).to(dtype)
    table[3, :3] = torch.tensor([6e-8, -torch.inf, 65504.0]).to(dtype)
    ids = torch.randint(0, 50, (m,))
    ids[:1] = 3
    for scale in (1.0, 24.0):
        got = embedding(ids, table, scale=scale)
        assert torch.equal(got, embedding_reference(ids, table, scale=scale))


@pytest.mark.parametrize("bad", [-1, 8, 1 << 40])
def test_bad_id_is_an_error_also_in_replay(bad: int) -> None:
    table = torch.randn(8, 16)
    with pytest.raises(RuntimeError, match="outside its table"):
        embedding(torch.tensor([1, bad]), table)
    ids = torch.tensor([1, 2])
    graph = record(lambda: embedding(ids, table))
    ids[1] = bad
    with pytest.raises(RuntimeError, match="outside its table"):
        graph.replay()
    ids[1] = 7
    assert torch.equal(graph.replay(), table[[1, 7]])


def test_opcheck() -> None:
    ids = torch.tensor([0, 2])
    torch.library.opcheck(torch.ops.exl3.embedding.default, (ids, torch.randn(3, 8).half(), 1.0))
