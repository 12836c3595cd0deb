"""Figures and texts about a model's parts, from file headers alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..loader.base import TensorSource
from ..modules import Linear, Module


def storage_info(modules: Sequence[Module], stc: TensorSource) -> tuple[float, float, int]:
    """Average bits per weight without the head, bits per weight of the head, total bits.

    Weights are counted without padding, so a layer that was padded shows what it really costs.
    """
    body_bits = body_weights = head_bits = head_weights = 0
    seen: set[str] = set()
    for module in (part for top in modules for part in top):
        if not isinstance(module, Linear) or module.key in seen:
            continue
        seen.add(module.key)
        bits = module.stored_bytes(stc) * 8
        if module.is_head:
            head_bits, head_weights = head_bits + bits, head_weights + module.weights_numel()
        else:
            body_bits, body_weights = body_bits + bits, body_weights + module.weights_numel()
    return (
        body_bits / max(body_weights, 1),
        head_bits / max(head_weights, 1),
        body_bits + head_bits,
    )


def layout_tree(modules: Sequence[Module], indent: int) -> str:
    """Text tree of modules; neighbours with the same shape are folded into one `[n x]`."""
    lines: list[str] = []
    shapes = [_shape(module) for module in modules]
    start = 0
    while start < len(modules):
        end = start + 1
        while end < len(modules) and shapes[end] == shapes[start]:
            end += 1
        lines.extend(_lines(modules[start], indent, end - start))
        start = end
    return "\n".join(lines)


def _shape(module: Module) -> tuple[object, ...]:
    name = module.key.rpartition(".")[2]
    own = "" if name.isdecimal() else name
    return (own, module.label(), *(_shape(child) for child in module.children()))


def _lines(module: Module, indent: int, count: int) -> list[str]:
    name = module.key if count == 1 else f"{module.key} [{count}x]"
    lines = [f"{' ' * indent}{name}: {module.label()}"]
    for child in module.children():
        lines.extend(_lines(child, indent + 2, 1))
    return lines
