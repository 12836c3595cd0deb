"""The device that a conversion runs on, and whether the calibration rows fit it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import ConfigError

CPU = "cpu"
_STATE_SHARE = 0.1  # of free device memory; several copies of the rows are alive at once


def device_name(text: str) -> int | str:
    """A value of `-d`: the number of a CUDA device, or `cpu`."""
    return CPU if text.lower() == CPU else int(text)


def conversion_device(devices: Sequence[int | str] | None) -> torch.device:
    """The device that `-d` means. None: the first CUDA device, or the CPU where there is none.

    Device 0 of a machine without CUDA is its CPU.

    Raises:
        ConfigError: there is no such device, or more than one is named.
    """
    import exl3_ext

    count = torch.cuda.device_count() if exl3_ext.has_cuda() else 0
    chosen = list(devices) if devices else [0]
    if len(chosen) > 1:
        raise ConfigError(f"-d --devices: this version converts on one device, got {chosen}")
    (wanted,) = chosen
    if wanted == CPU or (wanted == 0 and count == 0):
        return torch.device(CPU)
    if not 0 <= int(wanted) < count:
        known = ", ".join([*map(str, range(count)), CPU])
        raise ConfigError(f"-d --devices: no device {wanted} for exl3 here; there are: {known}")
    return torch.device("cuda", int(wanted))


def placed(state: Tensor, device: torch.device, copies: int = 1) -> Tensor:
    """The rows on the device if so many of them take little of it; else on the host, from where a
    few at a time are sent."""
    if device.type == CPU or state.device == device:
        return state
    free, _ = torch.cuda.mem_get_info(device)
    n_bytes = copies * state.numel() * state.element_size()
    return state.to(device) if n_bytes < _STATE_SHARE * free else state


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """On CUDA products of float32 read 10 bits of mantissa, as of float16, but keep the exponent.

    Several times as fast. A Hessian stays the second moments of inputs that differ from the true
    ones by 2^-11 each, far less than its damping.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type != CPU else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
