"""Recording and replay of op launches."""

import random
import subprocess
import sys

import pytest
import torch

from exl3.errors import UnsupportedError
from exl3.ops.graph import Arena, record
from exl3.ops.hadamard import hadamard_128, hadamard_128_reference
from exl3.ops.norm import rms_norm


def test_replay_reads_current_inputs() -> None:
    x = torch.randn(4, 256)
    graph = record(lambda: hadamard_128(hadamard_128(x).view(8, 128)))
    assert len(graph) == 2
    x.copy_(torch.randn(4, 256))
    want = hadamard_128_reference(hadamard_128_reference(x).view(8, 128))
    torch.testing.assert_close(graph.replay(), want, rtol=1e-5, atol=1e-5)


def test_foreign_op_is_refused_and_recording_ends() -> None:
    x = torch.randn(1, 128)
    with pytest.raises(UnsupportedError, match="aten::add"):
        record(lambda: hadamard_128(x) + 1)
    assert len(record(lambda: hadamard_128(x))) == 1


def test_recording_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from exl3.ops.graph import Arena, record; "
        "from exl3.ops.hadamard import hadamard_128; x = torch.ones(1, 128); "
        "record(lambda: hadamard_128(x)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WEIGHT = torch.linspace(0.5, 2, 384)


def normed(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, WEIGHT[: x.shape[1]], 1e-5)


def test_arena_holds_what_is_needed_at_the_same_time() -> None:
    """Results of a random program, each op on some earlier tensor, against tensors of their own."""
    for seed in range(20):
        rng = random.Random(seed)
        x = torch.randn(8, 128 * rng.randint(1, 3))
        sources = [rng.randint(0, i) for i in range(12)]
        wanted = [rng.randint(1, 12) for _ in range(3)]

        def program(x=x, sources=sources, wanted=wanted) -> list[torch.Tensor]:
            values = [x]
            for source in sources:
                values.append(normed(values[source]))
            return [values[i] for i in wanted]

        arena = Arena()
        graph = record(program, arena)
        assert arena.tensor is not None
        assert all(torch.equal(a, b) for a, b in zip(graph.result, program(), strict=True))
        x.copy_(torch.randn_like(x))
        assert all(torch.equal(a, b) for a, b in zip(graph.replay(), program(), strict=True))


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = normed(x)
    return x


def test_recordings_share_an_arena() -> None:
    arena, big, small = Arena(), torch.randn(64, 128), torch.randn(5, 128)
    first = record(lambda: chain(big), arena)
    memory = arena.tensor
    assert memory is not None and memory.nbytes == 2 * big.nbytes  # of 30 results
    second = record(lambda: chain(small), arena)
    assert arena.tensor is memory
    for x, graph in ((big, first), (small, second)) * 2:
        x.copy_(torch.randn_like(x))
        assert torch.equal(graph.replay(), chain(x))
    bigger = torch.randn(200, 128)
    third = record(lambda: chain(bigger), arena)
    assert arena.tensor is not memory
    assert torch.equal(first.replay(), chain(big)) and torch.equal(third.replay(), chain(bigger))


def test_what_differs_from_what_was_measured_is_refused() -> None:
    inputs = iter([torch.zeros(4, 128), torch.zeros(8, 128)])
    with pytest.raises(RuntimeError, match="differs from what was measured"):
        record(lambda: normed(next(inputs)), Arena())
    x = torch.randn(1, 128)
    with pytest.raises(UnsupportedError, match="aten::add"):
        record(lambda: normed(x) + 1, Arena())
    assert len(record(lambda: normed(x), Arena())) == 1
