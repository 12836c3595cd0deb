"""Paged caches of keys and values."""

from .base import CacheLayer
from .cache import Cache
from .dense import CacheLayer_fp16
from .quantized import CacheLayer_quant
from .unsupported import (
    CacheLayer_dsa,
    CacheLayer_MLA_fp16,
    CacheLayer_MLA_quant,
    RecurrentCache,
)

__all__ = [
    "Cache",
    "CacheLayer",
    "CacheLayer_MLA_fp16",
    "CacheLayer_MLA_quant",
    "CacheLayer_dsa",
    "CacheLayer_fp16",
    "CacheLayer_quant",
    "RecurrentCache",
]
