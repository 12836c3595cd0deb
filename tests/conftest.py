"""Shared fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from exl3.ops.registry import ops
from exl3.settings import ISA_LEVELS

# Tests that mean a GPU name it.
os.environ.setdefault("EXL3_DEFAULT_DEVICE", "cpu")  # noqa: TID251
# And tests leave no files in the user's cache folder.
os.environ.setdefault("EXL3_CUDA_TUNING", "0")  # noqa: TID251

# A change is judged on the same random examples every time; other runs look for new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):  # noqa: TID251
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Numbers that a test draws without a seed of its own do not hang on the tests before it."""
    torch.manual_seed(0)


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


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For references made of many small torch calls: torch's threads only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    """A CUDA device with compiled kernels; the test is skipped without one."""
    import exl3_ext

    if not exl3_ext.has_cuda():
        pytest.skip("no CUDA device, or the CUDA library is not built")
    return torch.device("cuda", torch.cuda.current_device())
