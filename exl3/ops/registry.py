"""Loading the compiled library and registering shape rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from ..settings import ISA_LEVELS, settings

F = TypeVar("F", bound=Callable[..., Any])

_fakes: dict[str, Callable[..., Any]] = {}


def fake(name: str) -> Callable[[F], F]:
    """Decorator: the shape rule of op `exl3::<name>`, registered when the library is loaded."""

    def note(rule: F) -> F:
        _fakes[name] = rule
        return rule

    return note


@cache
def ops() -> Any:
    """The namespace `torch.ops.exl3`, with the library loaded and set up by the settings."""
    import exl3_ext

    exl3_ext.load()
    namespace = torch.ops.exl3
    chosen = settings()
    namespace.configure_cpu(chosen.cpu_threads, ISA_LEVELS.index(chosen.cpu_max_isa))
    if exl3_ext.has_cuda() and chosen.cuda_max_capability != "any":
        namespace.configure_cuda(int(chosen.cuda_max_capability.replace(".", "")))
    for name, rule in _fakes.items():
        torch.library.register_fake(f"exl3::{name}", rule)
    return namespace
