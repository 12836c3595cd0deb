"""Which part of a model goes to which device: arithmetic over sizes, without a device call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import OutOfMemory

GIB = 1 << 30


def gib(n_bytes: int) -> str:
    """Bytes as a text in GiB."""
    return f"{n_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Unit:
    """Top-level modules that must lie on one device. Sizes are bytes."""

    name: str
    modules: tuple[int, ...]  # places in `Model.modules`
    resident: int  # weights and their share of the caches
    working: int  # what computing in it takes on top; units of a device share it


@dataclass(frozen=True, slots=True)
class Room:
    """A device and the bytes that a model may use there, of those that are free."""

    device: torch.device
    usable: int
    free: int


@dataclass(frozen=True, slots=True)
class Part:
    """Units on one device."""

    device: torch.device
    units: tuple[Unit, ...]
    overhead: int = 0  # bytes that a device takes whatever lies on it

    @property
    def needed(self) -> int:
        """Bytes that the part takes on its device."""
        working = max((unit.working for unit in self.units), default=0)
        return self.overhead + working + sum(unit.resident for unit in self.units)

    def text(self) -> str:
        """One line: device, modules, bytes."""
        first, last = self.units[0].name, self.units[-1].name
        names = first if first == last else f"{first} to {last}"
        return f"{self.device}: {names}, {gib(self.needed)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every top-level module lies. Parts follow each other in the order of the model, except
    that a layer which a layer map repeats stays where it lies."""

    parts: tuple[Part, ...]

    @property
    def devices(self) -> list[torch.device]:
        """The devices in order, each once."""
        return list(dict.fromkeys(part.device for part in self.parts))

    def part_of(self) -> list[int]:
        """The part of every top-level module."""
        found = {
            module: index
            for index, part in enumerate(self.parts)
            for unit in part.units
            for module in unit.modules
        }
        return [found[module] for module in range(len(found))]

    def text(self) -> str:
        """All parts."""
        return "; ".join(part.text() for part in self.parts)


def whole(units: Sequence[Unit], device: torch.device, overhead: int = 0) -> Plan:
    """All units on one device, whether they fit or not."""
    return Plan((Part(device, tuple(units), overhead),))


def fill(units: Sequence[Unit], rooms: Iterable[Room], overhead: int) -> Plan:
    """Fill the rooms one after another; what does not fit goes to the next. Rooms that are not
    needed are not asked for.

    Args:
        overhead: bytes that every device in use takes besides.
    Raises:
        OutOfMemory: something is left over; says what each device has and holds.
    """
    parts: list[Part] = []
    seen: list[Room] = []
    start = 0
    for room in rooms:
        seen.append(room)
        end = start
        while end < len(units):
            if Part(room.device, tuple(units[start : end + 1]), overhead).needed > room.usable:
                break
            end += 1
        if end > start:
            parts.append(Part(room.device, tuple(units[start:end]), overhead))
            start = end
        if start == len(units):
            return Plan(tuple(parts))
    raise _no_room(units, seen, parts, overhead)


def place(units: Sequence[Unit], rooms: Iterable[Room], overhead: int, *, in_order: bool) -> Plan:
    """The first room that takes everything, since a model runs fastest on one device; if there is
    none, or `in_order`, `fill`.

    Raises:
        OutOfMemory: see `fill`.
    """
    if in_order:
        return fill(units, rooms, overhead)
    seen = []
    for room in rooms:
        seen.append(room)
        plan = whole(units, room.device, overhead)
        if plan.parts[0].needed <= room.usable:
            return plan
    return fill(units, seen, overhead)


def _no_room(
    units: Sequence[Unit], rooms: Sequence[Room], parts: Sequence[Part], overhead: int
) -> OutOfMemory:
    """What is needed in all, what each device offers and holds, and what is left over."""
    held = {part.device: part for part in parts}
    placed = sum(len(part.units) for part in parts)
    needed = Part(torch.device("cpu"), tuple(units), overhead).needed
    listed = "; ".join(
        f"{room.device} {gib(room.usable)} of {gib(room.free)} free"
        + (f", takes {held[room.device].text().partition(': ')[2]}" if room.device in held else "")
        for room in rooms
    )
    left = Part(torch.device("cpu"), tuple(units[placed:]), overhead)
    return OutOfMemory(
        f"the model with its caches needs {gib(needed)}; usable are: {listed or 'no device'}. No"
        f" device is left for {left.text().partition(': ')[2]}, of which {units[placed].name} needs"
        f" {gib(Part(left.device, (units[placed],), overhead).needed)}. Take a model of fewer bits,"
        " a smaller cache, more of a device (use_per_device, reserve_per_device), or device='cpu'"
    )
