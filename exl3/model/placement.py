"""Which devices a model goes to, by arithmetic before a weight is read.

What it needs there is its tensors as the files hold them, the attached caches, and room to compute
in; what a device offers is its free memory less what must stay free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, OutOfMemory
from ..loader.base import TensorSource
from ..loader.staging import AHEAD_BYTES
from ..modules import Block, Embedding, Linear, Module
from ..settings import settings
from .split import GIB, Plan, Room, Unit, gib, place, whole

if TYPE_CHECKING:
    from .load_options import LoadArguments
    from .model import Model

logger = logging.getLogger(__name__)

DEFAULT_RESERVE_GIB = 0.5
OVERHEAD_BYTES = 192 << 20
"""Code of kernels and libraries and their workspaces, on every device in use."""
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a load may take of each device.

    `reserve`: GiB to leave free: a number, or a list in which a missing entry is 0.5 and a negative
    one excludes the device. `use`: GiB that this process may use in all: a number, or a list in
    which 0 or a missing entry excludes the device. At most one of the two is given; neither: 0.5
    GiB stay free on each.
    """

    reserve: PerDevice = None
    use: PerDevice = None

    def excludes(self, index: int) -> bool:
        """Whether a device is left alone.

        Raises:
            ConfigError: sizes that are not numbers.
        """
        return self._use(index) <= 0 if self.use is not None else self._reserve(index) < 0

    def usable(self, index: int, *, free: int, held: int) -> int:
        """Bytes that a model may take.

        Args:
            free: bytes that are free.
            held: bytes that this process has in use there.
        """
        if self.use is not None:
            return max(min(free, int(self._use(index) * GIB) - held), 0)
        return max(free - int(self._reserve(index) * GIB), 0)

    def _use(self, index: int) -> float:
        return gib_of(self.use, index, missing=0.0, name="use_per_device")

    def _reserve(self, index: int) -> float:
        missing = DEFAULT_RESERVE_GIB
        return gib_of(self.reserve, index, missing=missing, name="reserve_per_device")


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


def held_bytes(device: torch.device | int) -> int:
    """Bytes that tensors of this process take on a CUDA device."""
    return torch.cuda.memory_allocated(device)


def units_of(model: Model, arguments: LoadArguments) -> list[Unit]:
    """The model in pieces that lie on one device each, in running order, sized from file headers.

    A layer that a layer map repeats is one unit with the cache layers of all its repeats; the final
    norm is fused into the head.
    """
    stc, modules = model.config.stc, model.modules
    places: dict[str, list[int]] = {}
    for index, module in enumerate(modules[:-2]):
        places.setdefault(module.key, []).append(index)
    rows = max(arguments.max_chunk_size, arguments.max_batch_size, 1)
    # At the least what reading ahead keeps there.
    working = max(_DECODED_BYTES + rows * _row_bytes(model), AHEAD_BYTES)
    units = []
    for key, indices in places.items():
        weights = _weight_bytes(modules[indices[0]], stc)
        blocks = [module for i in indices if isinstance(module := modules[i], Block)]
        caches = sum(_cache_bytes(model, block.attention.instance) for block in blocks)
        units.append(Unit(key, tuple(indices), weights + caches, working))
    last = (len(modules) - 2, len(modules) - 1)
    weights = sum(_weight_bytes(modules[i], stc) for i in last)
    positions = max(arguments.max_output_size, arguments.max_batch_size)
    logits = positions * arguments.max_output_factor * 2 * model.config.vocab_size * _FLOAT
    units.append(Unit(modules[-1].key, last, weights, working + logits))
    return units


def _weight_bytes(module: Module, stc: TensorSource) -> int:
    return sum(loaded_bytes(part, stc) for part in module)


def _cache_bytes(model: Model, instance: int) -> int:
    layers = [cache.layers[instance] for cache in model.caches()]
    return sum(layer.storage_size() + layer.overhead_size() for layer in layers)


def _row_bytes(model: Model) -> int:
    """Activations of a token: in and out of the widest layer for both of its weights, and the
    residual stream."""
    config = model.config
    wide = max(config.intermediate_size, config.hidden_size)
    return (4 * wide + 6 * config.hidden_size) * _HALF


def make_plan(model: Model, arguments: LoadArguments) -> Plan:
    """Where the model goes.

    A device that was named takes all of it. Otherwise the first CUDA device with room for all of it
    does; if there is none, or `use_per_device` says how much of each to use, devices are filled one
    after another. The CPU, where there is no CUDA device or `EXL3_DEFAULT_DEVICE` is cpu.

    Raises:
        OutOfMemory: no room; says what is needed and what each device has.
        ConfigError: sizes that are not numbers; in strict mode also sizes without a CUDA device,
            which else are a warning.
    """
    import exl3_ext

    units, target = units_of(model, arguments), arguments.target()
    if target is None and (settings().default_device == "cpu" or not exl3_ext.has_cuda()):
        target = torch.device("cpu")
        if arguments.use_per_device is not None:
            _report_unused(arguments)
    if target is None:
        rooms = device_rooms(arguments)
        return place(units, rooms, OVERHEAD_BYTES, in_order=arguments.use_per_device is not None)
    if target.type != "cuda":
        return whole(units, target)
    free = free_bytes(target)
    return place(units, [Room(target, free, free)], OVERHEAD_BYTES, in_order=False)


def _report_unused(arguments: LoadArguments) -> None:
    text = (
        f"use_per_device={arguments.use_per_device!r} speaks of CUDA devices, but the model goes to"
        " the CPU: there is none with compiled kernels, or EXL3_DEFAULT_DEVICE is cpu"
    )
    if settings().strict:
        raise ConfigError(text)
    logger.warning("%s", text)


def device_rooms(arguments: LoadArguments) -> Iterator[Room]:
    """What the CUDA devices offer, one after another: to ask a device takes half a GiB of it, so
    those that are excluded or not needed are not asked."""
    limits = Limits(arguments.reserve_per_device, arguments.use_per_device)
    for index in range(torch.cuda.device_count()):
        if not limits.excludes(index):
            device = torch.device("cuda", index)
            free = free_bytes(device)
            usable = limits.usable(index, free=free, held=held_bytes(device))
            yield Room(device, usable, free)


def out_of_memory(plan: Plan, device: torch.device) -> OutOfMemory:
    """The error for a device that ran full although the plan fitted: others use it, too."""
    needed = sum(part.needed for part in plan.parts if part.device == device)
    return OutOfMemory(
        f"{device} ran out of memory while the model was loaded: its part needs {gib(needed)} with"
        f" the caches, and {gib(free_bytes(device))} are free now; other programs use the device,"
        " or a cache was attached meanwhile"
    )
