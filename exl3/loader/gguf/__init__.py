"""GGUF files as a source: weights de-quantised, config and tokenizer rebuilt from the metadata."""

from .source import GgufTensors, open_gguf

__all__ = ["GgufTensors", "open_gguf"]
