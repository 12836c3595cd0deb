"""Layer types of the interface that this version does not have yet."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from .dense import CacheLayer_fp16


class _Unsupported(CacheLayer_fp16):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not supported yet: use CacheLayer_fp16")


class CacheLayer_MLA_fp16(_Unsupported):
    """One latent per token."""


class CacheLayer_MLA_quant(_Unsupported):
    """One quantised latent per token."""


class CacheLayer_dsa(_Unsupported):
    """Keys for sparse attention."""


class RecurrentCache:
    """Checkpoints of recurrent state in system memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("recurrent state is not supported yet")
