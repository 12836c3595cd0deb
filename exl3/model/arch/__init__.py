"""One small file per architecture family; `ARCHITECTURES` maps a name to its spec."""

from __future__ import annotations

import importlib
import pkgutil

from ..arch_spec import Arch


def _collect() -> dict[str, Arch]:
    found: dict[str, Arch] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, Arch):
                found[value.name] = value
    return found


ARCHITECTURES: dict[str, Arch] = _collect()
