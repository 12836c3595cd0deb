"""Filter on top of the `formatron` package."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from .base import Filter


class FormatronFilter(Filter):
    """Constrains to what a formatron `FormatterBuilder` describes."""

    def __init__(
        self,
        tokenizer: Any,
        trigger_token: int | None = None,
        prefix_str: str | None = None,
        eos_after_completed: bool = False,
        formatter_builder: Any = None,
        engine_config: Any = None,
        vocab_processors: Any = None,
    ) -> None:
        super().__init__(tokenizer, trigger_token, prefix_str, eos_after_completed)
        if formatter_builder is None:
            raise ConfigError("FormatronFilter: formatter_builder is required")
        try:
            from formatron.config import EngineGenerationConfig
            from formatron.integrations.utils import get_original_characters
            from kbnf import Vocabulary
        except ImportError as error:
            raise ConfigError(
                "FormatronFilter needs the package `formatron`: pip install formatron"
            ) from error
        pieces = tokenizer.get_vocab_dict()
        originals = get_original_characters(pieces, vocab_processors)
        texts = {token: piece for piece, token in pieces.items()}
        vocabulary = Vocabulary(originals, texts)
        self._engine_config = engine_config or EngineGenerationConfig()
        self._formatter = formatter_builder.build(
            vocabulary, lambda tokens: tokenizer.decode(torch.tensor(tokens))
        )
        self.reset()

    def reset(self) -> None:
        self._formatter.reset()
        if self._engine_config.read_prompt and self.prefix_str:
            for token in self.tokenizer.encode(self.prefix_str).flatten().tolist():
                self._formatter.accept_token(token)

    def accept_token(self, token: int) -> None:
        self._formatter.accept_token(token)

    def get_next_logit_mask(self) -> Tensor:
        self._formatter.compute_allowed_tokens()
        allowed = np.array(list(self._formatter.get_allowed_tokens_since_last_computation()))
        mask = torch.full((1, self.vocab_size), -torch.inf, dtype=self.logits_dtype)
        mask[0, torch.from_numpy(allowed.astype(np.int64))] = 0
        return mask

    def is_completed(self) -> bool:
        return bool(self._formatter.is_completed())
