"""Which device a model goes to, by arithmetic before a weight is read.

A model lies on one device. What it needs there is its tensors as the files hold them, the attached
caches, and room to compute in; what a device offers is its free memory less what must stay free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, OutOfMemory
from ..loader.base import TensorSource
from ..loader.staging import AHEAD_BYTES
from ..modules import Embedding, Linear, Module
from ..settings import settings

if TYPE_CHECKING:
    from .load_options import LoadArguments
    from .model import Model

GIB = 1 << 30
DEFAULT_RESERVE_GIB = 0.5
_DECODED_BYTES = 256 << 20  # weights decoded at once for a product of many rows
_HALF = 2
_FLOAT = 4

PerDevice = float | Sequence[float] | None


def gib_of(values: PerDevice, index: int, *, missing: float, name: str) -> float:
    """GiB for a device from a number for all or a list by index.

    Raises:
        ConfigError: something else.
    """
    if values is None:
        return missing
    try:
        if isinstance(values, int | float):
            return float(values)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError
        return float(values[index]) if index < len(values) else missing
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is {values!r}, expected GiB as a number or a list of numbers"
        ) from error


def rooms(free: Sequence[int], reserve: PerDevice, use: PerDevice) -> list[int]:
    """Bytes that may be used on each device; 0 where a device is excluded.

    Args:
        free: free bytes by index.
        reserve: GiB to leave free: a number, or a list in which a missing entry is 0.5 and a
            negative one excludes the device.
        use: GiB to use: a number, or a list in which 0 or a missing entry excludes the device.
            At most one of the two is given; neither: 0.5 GiB stay free on each.
    """
    result = []
    for index, n_bytes in enumerate(free):
        if use is not None:
            wanted = gib_of(use, index, missing=0.0, name="use_per_device")
            result.append(max(min(n_bytes, int(wanted * GIB)), 0))
            continue
        left = gib_of(reserve, index, missing=DEFAULT_RESERVE_GIB, name="reserve_per_device")
        result.append(max(n_bytes - int(left * GIB), 0) if left >= 0 else 0)
    return result


def first_fit(needed: int, offered: Sequence[int], free: Sequence[int]) -> int:
    """Index of the first device that offers what is needed.

    Raises:
        OutOfMemory: none does; says what is needed, offered and free.
    """
    for index, n_bytes in enumerate(offered):
        if needed <= n_bytes:
            return index
    listed = ", ".join(
        f"cuda:{i} {_gib(room)} of {_gib(n_bytes)} free"
        for i, (room, n_bytes) in enumerate(zip(offered, free, strict=True))
    )
    raise OutOfMemory(
        f"the model with its caches needs {_gib(needed)} on one device; usable are: {listed}. Take"
        " a model of fewer bits, a smaller cache, or device='cpu'; this version does not split"
        " layers over devices"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


def loaded_bytes(part: Module, stc: TensorSource) -> int:
    """Bytes of a module's own tensors on a device, its children left out."""
    if isinstance(part, Linear) and not stc.has(f"{part.key}.trellis"):
        return part.weights_numel() * _HALF
    if isinstance(part, Embedding):
        return part.vocab * part.hidden * _HALF
    return 0 if part.children() else part.stored_bytes(stc)


def free_bytes(device: torch.device | int) -> int:
    """Free memory of a CUDA device, with what torch holds there unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def needed_bytes(model: Model, arguments: LoadArguments) -> int:
    """What the model needs on one CUDA device with its attached caches, from file headers."""
    config, stc = model.config, model.config.stc
    weights = sum(loaded_bytes(part, stc) for top in model.modules for part in top)
    caches = sum(cache.storage_size() for cache in model.caches())
    rows = max(arguments.max_chunk_size, arguments.max_batch_size, 1)
    wide = max(config.intermediate_size, config.hidden_size)
    # In and out of the widest layer for both of its weights, and the residual stream.
    activations = rows * (4 * wide + 6 * config.hidden_size) * _HALF
    logits = max(arguments.max_output_size, arguments.max_batch_size) * arguments.max_output_factor
    logits *= 2 * config.vocab_size * _FLOAT
    return weights + caches + max(_DECODED_BYTES + activations + logits, AHEAD_BYTES)


def automatic_device(model: Model, arguments: LoadArguments) -> torch.device:
    """The device for a model for which none was named: the first CUDA device with room for all of
    it, or the CPU where there is no CUDA device or `EXL3_DEFAULT_DEVICE` is cpu.

    Raises:
        OutOfMemory: no CUDA device has the room.
        ConfigError: sizes that are not numbers.
    """
    import exl3_ext

    if settings().default_device == "cpu" or not exl3_ext.has_cuda():
        return torch.device("cpu")
    free = [free_bytes(i) for i in range(torch.cuda.device_count())]
    offered = rooms(free, arguments.reserve_per_device, arguments.use_per_device)
    return torch.device("cuda", first_fit(needed_bytes(model, arguments), offered, free))


def check_room(model: Model, arguments: LoadArguments, device: torch.device) -> None:
    """Check a device that was named.

    Raises:
        OutOfMemory: the model does not fit its free memory.
    """
    if device.type != "cuda":
        return
    free = free_bytes(device)
    needed = needed_bytes(model, arguments)
    if needed > free:
        raise OutOfMemory(
            f"the model with its caches needs {_gib(needed)}, and {device} has {_gib(free)} free;"
            " take a model of fewer bits, a smaller cache, or device='cpu'"
        )


def out_of_memory(model: Model, arguments: LoadArguments, device: torch.device) -> OutOfMemory:
    """The error for a device that ran full although the plan fitted: others use it, too."""
    return OutOfMemory(
        f"{device} ran out of memory while the model was loaded: it needs"
        f" {_gib(needed_bytes(model, arguments))} with its caches, and"
        f" {_gib(free_bytes(device))} are free now; other programs use the device, or a cache was"
        " attached meanwhile"
    )


def describe(model: Any, arguments: LoadArguments, device: torch.device) -> str:
    """One line for `verbose`."""
    return f"{model.config.architecture}: {_gib(needed_bytes(model, arguments))} on {device}"
