"""Text to token ids and back, chat templates, streamed text."""

from .embedding import MMEmbedding
from .stream import StreamDecoder
from .tokenizer import Tokenizer

__all__ = ["MMEmbedding", "StreamDecoder", "Tokenizer"]
