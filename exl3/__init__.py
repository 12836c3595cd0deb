"""exl3: quantise language models to EXL3 and run them. Importing needs no GPU or compiler."""

from .version import __version__

__all__ = ["__version__"]
