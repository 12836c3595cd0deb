"""Recording and replay of op launches."""

import subprocess
import sys

import pytest
import torch

from exl3.errors import UnsupportedError
from exl3.ops.graph import record
from exl3.ops.hadamard import hadamard_128, hadamard_128_reference


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
        "import sys, torch; from exl3.ops.graph import record; "
        "from exl3.ops.hadamard import hadamard_128; x = torch.ones(1, 128); "
        "record(lambda: hadamard_128(x)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
