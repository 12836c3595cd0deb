"""The version of exl3."""

__version__ = "0.1.0"
