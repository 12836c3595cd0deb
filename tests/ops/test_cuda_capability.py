"""What a build goes by on a CUDA device, and the ways of smaller devices on the one here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl3.ops.registry import ops

pytestmark = pytest.mark.cuda
HERE = Path(__file__).parent


def test_goes_by_the_device_at_most(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    assert 75 <= ops().cuda_capability(device.index) <= 10 * major + minor


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["7.5", "8.6"])
@pytest.mark.parametrize("name", ["attention", "kv_quant", "encode", "linear", "route"])
def test_ways_of_smaller_devices(device: torch.device, capability: str, name: str) -> None:
    """Less shared memory, no clusters: what these tests ask for holds all the same."""
    found = torch.cuda.get_device_capability(device)
    if found <= tuple(int(part) for part in capability.split(".")):
        pytest.skip(f"this device is of {found} itself")
    env = {**os.environ, "EXL3_CUDA_MAX_CAPABILITY": capability}  # noqa: TID251
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "cuda and not slow"]
    done = subprocess.run(
        [*command, str(HERE / f"test_cuda_{name}.py")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
