"""Reading and writing model files: safetensors directories and GGUF files."""

from .base import ModelSource, TensorInfo, TensorSource
from .safetensors import SafetensorsCollection, VariantSafetensorsCollection, load_tensors
from .source import open_source
from .writer import TensorSpec, save_tensors, write_file, write_sharded

__all__ = [
    "ModelSource",
    "SafetensorsCollection",
    "TensorInfo",
    "TensorSource",
    "TensorSpec",
    "VariantSafetensorsCollection",
    "load_tensors",
    "open_source",
    "save_tensors",
    "write_file",
    "write_sharded",
]
