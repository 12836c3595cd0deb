"""Filters: constraints on what may be sampled."""

from .base import Filter
from .formatron import FormatronFilter
from .llguidance import LLGuidanceFilter

__all__ = ["Filter", "FormatronFilter", "LLGuidanceFilter"]
