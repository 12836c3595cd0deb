"""Errors that exl3 raises.

A message says what was expected, what came, which tensor or key, and what to do.
"""


class Exl3Error(Exception):
    """Base of all errors of this library."""


class ConfigError(Exl3Error, ValueError):
    """A model's configuration, or an argument, cannot be used."""


class FormatError(Exl3Error, ValueError):
    """A file is damaged, or does not follow its format."""


class ShapeError(Exl3Error, ValueError):
    """A tensor has the wrong shape or dtype."""


class SettingsError(Exl3Error, ValueError):
    """A setting (an `EXL3_*` variable) has a bad value or is unknown."""


class UnsupportedError(Exl3Error, NotImplementedError):
    """Well-formed, but not something that exl3 can do."""


class StorageError(Exl3Error, OSError):
    """A file cannot be read, written or fetched: missing, no permission, full disk, offline."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class OutOfMemory(Exl3Error, RuntimeError):
    """Not enough device memory; says how much was needed and how much is free."""


class CacheFullError(Exl3Error, ValueError, AssertionError):
    """A job can never fit the cache.

    Also an `AssertionError`, because servers written for ExLlamaV3 look for one that
    contains `cannot be enqueued`.
    """
