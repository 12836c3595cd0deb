"""Parts of a model. No module knows a model's name: specs in `exl3.model.arch` combine them."""

from .attention import Attention
from .base import LoadOptions, Module
from .batch import Batch
from .block import Block
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm
from .rope import Rope, RopeSettings

__all__ = [
    "Attention",
    "Batch",
    "Block",
    "Embedding",
    "GatedMLP",
    "Head",
    "Linear",
    "LoadOptions",
    "Module",
    "RMSNorm",
    "Rope",
    "RopeSettings",
]
