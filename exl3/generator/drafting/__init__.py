"""Speculative decoding: guessing tokens, so that one pass can check several."""

from .base import Drafter
from .length import DraftLength, DraftOptions
from .setup import draft_options, speculation
from .speculation import Speculation

__all__ = ["DraftLength", "DraftOptions", "Drafter", "Speculation", "draft_options", "speculation"]
