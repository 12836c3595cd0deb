"""Steps and `CustomSampler`, under the path of the public interface."""

from ...sampling import *  # noqa: F403
from ...sampling import __all__ as __all__
