"""Samplers under the names of the public interface; the work is done in `exl3.sampling`."""

from ...sampling import *  # noqa: F403
from ...sampling import __all__ as __all__
