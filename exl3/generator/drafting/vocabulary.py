"""Whether a draft model speaks of the same tokens as the main model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ...errors import ConfigError

logger = logging.getLogger(__name__)


def check_vocabularies(model: Any, draft_model: Any, tokenizer: Any) -> None:
    """Compare the tokenizers of both directories; without them, the sizes of the vocabularies.

    Ids that only one of the two has are no obstacle: they are not drafted, and a text with an id
    that the draft model lacks goes on without drafts.

    Raises:
        ConfigError: an id has another text in the draft model's vocabulary.
    """
    own, other = _stored(model), _stored(draft_model)
    if own is None or other is None:
        known, wanted = draft_model.config.vocab_size, tokenizer.actual_vocab_size
        if known < wanted:
            raise ConfigError(
                f"the draft model has {known} tokens, the tokenizer {wanted}; choose a draft model"
                " with the same tokenizer"
            )
        return
    if own == other:
        return
    pieces, others = _pieces(own), _pieces(other)
    common = pieces.keys() & others.keys()
    differing = sorted(i for i in common if pieces[i] != others[i])
    if differing or not common:
        where = "they have no id in common"
        if differing:
            first = differing[0]
            where = (
                f"{len(differing)} ids have another text, the first is {first}: "
                f"{pieces[first]!r} here, {others[first]!r} there"
            )
        raise ConfigError(
            "the draft model's tokenizer is not that of the model, so that its tokens would mean"
            f" something else: {where}. Choose a draft model of the same family"
        )
    missing = len(pieces) - len(common)
    if missing:
        logger.info("%d tokens of the model are unknown to the draft model", missing)


def _stored(model: Any) -> bytes | None:
    """tokenizer.json of a model's directory."""
    directory = getattr(model.config, "directory", None)
    path = None if directory is None else Path(directory) / "tokenizer.json"
    return path.read_bytes() if path is not None and path.is_file() else None


def _pieces(stored: bytes) -> dict[int, str]:
    """Text by id. Added tokens are left out: those of a tuned model often have other names than the
    reserved ones that they replace."""
    try:
        vocab = json.loads(stored)["model"]["vocab"]
        if isinstance(vocab, dict):
            return {int(i): piece for piece, i in vocab.items()}
        return {i: item[0] for i, item in enumerate(vocab)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"tokenizer.json of model or draft model: {error!r}") from error
