"""Models split over made-up devices, and a check that no op mixes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exl3 import Model
from exl3.model.load_options import LoadArguments
from exl3.model.placement import units_of
from exl3.model.split import Part, Plan


def stand_ins(count: int) -> list[torch.device]:
    """Devices that torch tells apart, although all are the CPU: a move between them is a copy."""
    return [torch.device("cpu", index) for index in range(count)]


def spread(model: Model, devices: Sequence[torch.device]) -> Plan:
    """The units in order, as many on each device as on the next, as far as they go."""
    units = units_of(model, LoadArguments())
    ends = [len(units) * (i + 1) // len(devices) for i in range(len(devices))]
    starts = [0, *ends[:-1]]
    cut = zip(devices, starts, ends, strict=True)
    return Plan(tuple(Part(d, tuple(units[a:b])) for d, a, b in cut if b > a))


def load_split(model: Model, devices: Sequence[torch.device]) -> Model:
    """Load a model spread over these devices; returns it."""
    for _ in model._load_gen(LoadArguments(), spread(model, devices)):
        pass
    return model


HOST = -1


class Borders(TorchDispatchMode):
    """Gives every tensor the device that it was made on or moved to, a `stand_ins` or the host, and
    refuses ops that read tensors of two devices, as torch does with real ones."""

    # Its frequencies follow the device that a tensor tells, which is the CPU for all stand-ins.
    EXEMPT = ("exl3::rope_table",)

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        self.moves: list[tuple[int, int, tuple[int, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def place(self, tensor: torch.Tensor) -> int:
        """Index of the device, or HOST."""
        return self._places.get(tensor.untyped_storage().data_ptr(), HOST)

    def _note(self, tensor: torch.Tensor, place: int) -> None:
        self._kept.append(tensor)
        self._places[tensor.untyped_storage().data_ptr()] = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {self.place(t) for t in inputs if t.dim() and t.numel()}
        name = func.name().split(".")[0]
        result = func(*args, **kwargs)
        device = kwargs.get("device")
        if name == "aten::copy_":
            return result
        if device is not None and (not inputs or name == "aten::_to_copy"):
            place = HOST if device.index is None else device.index
            if inputs:
                self.moves.append((self.place(inputs[0]), place, tuple(inputs[0].shape)))
        else:
            assert len(places) < 2 or name in self.EXEMPT, f"{name} reads devices {sorted(places)}"
            place = max(places, default=HOST)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not any(tensor is t for t in inputs):
                self._note(tensor, place)
        return result
