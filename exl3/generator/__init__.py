"""Generation: jobs, the generator that runs them, and its asynchronous form."""

from .async_generator import AsyncGenerator, AsyncJob
from .filter import Filter, FormatronFilter, LLGuidanceFilter
from .generator import Generator
from .job import Job

__all__ = [
    "AsyncGenerator",
    "AsyncJob",
    "Filter",
    "FormatronFilter",
    "Generator",
    "Job",
    "LLGuidanceFilter",
]
