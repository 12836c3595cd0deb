"""Running programs written for ExLlamaV3 without a change to their imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .errors import ConfigError
from .version import __version__

ALIAS = "exllamav3"
OWN = __name__.rpartition(".")[0]
# The interface version that programs check for, then ours.
ALIAS_VERSION = f"1.4.1+{OWN}.{__version__}"


class _Package(ModuleType):
    """`exllamav3`: all that `exl3` has. An object of its own because `version` differs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[OWN], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(sys.modules[OWN])})


class _AliasLoader(Loader):
    """Gives the module of another name."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == ALIAS:
            return _Package(ALIAS, sys.modules[OWN].__doc__)
        if spec.name == ALIAS + ".version":
            module = ModuleType(spec.name)
            module.__version__ = ALIAS_VERSION  # type: ignore[attr-defined]
            return module
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._spec is not None:  # the import system has put its own there
            module.__spec__ = self._spec


class AliasFinder(MetaPathFinder):
    """Finds `exllamav3.<sub>` wherever there is an `exl3.<sub>`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(ALIAS + "."):
            return None
        real = OWN + fullname[len(ALIAS) :]
        try:
            found = importlib.util.find_spec(real)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        package = found.submodule_search_locations
        return ModuleSpec(fullname, _AliasLoader(real), is_package=package is not None)


def install_alias() -> None:
    """Make `import exllamav3` and `from exllamav3.<sub> import ...` give exl3; harmless twice.

    Submodules are the same objects under both names; `exllamav3.version.__version__` alone
    differs, because programs compare it.

    Raises:
        ConfigError: another `exllamav3` is loaded already.
    """
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    loaded = [name for name in sys.modules if name.startswith(ALIAS + ".")]
    if loaded:
        raise ConfigError(f"install_alias: {loaded[0]} is loaded already; call it earlier")
    sys.meta_path.insert(0, AliasFinder())
    if ALIAS in sys.modules:  # a package of that name that is just calling us
        del sys.modules[ALIAS]
        importlib.import_module(ALIAS)
