"""Configuration and models."""

from .config import Config, InferParams
from .model import Model

__all__ = ["Config", "InferParams", "Model"]
