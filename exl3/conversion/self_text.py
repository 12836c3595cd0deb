"""Text that the model itself writes: the nearest thing to what it was trained on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache import Cache
from ..constants import PAGE_SIZE
from ..errors import Exl3Error
from ..model import Model
from ..modules import Linear
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..model import Config

logger = logging.getLogger(__name__)

BATCH = 32
MAX_TOKENS = 256
MAX_WEIGHTS = 400_000_000  # sampling reads all weights per token: beyond this it takes minutes
_TEMPERATURE = 1.0
_MARK = "\u2063text\u2063"


def can_sample(model: Model) -> bool:
    """True if sampling takes seconds, judged by the model's size: the same answer every time."""
    weights = sum(m.weights_numel() for m in model if isinstance(m, Linear))
    return weights <= MAX_WEIGHTS


def openings(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids to start from: an empty text, and a user's turn of the chat template if there is one."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    result = [[start if start is not None else 0]]
    try:
        text = tokenizer.hf_render_chat_template([{"role": "user", "content": _MARK}])
    except Exl3Error:
        return result
    head, mark, _ = str(text).partition(_MARK)
    if mark and head:
        result.append(tokenizer.encode(head, encode_special_tokens=True)[0].tolist())
    return result


def sample_text(
    config: Config,
    tokenizer: Tokenizer,
    *,
    seed: int,
    tokens: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`BATCH` texts of `tokens` tokens each, sampled from the plain model: int64 (BATCH, tokens).

    Half start from nothing, half as a user's turn. A text goes on after its end mark, as a new
    one would.
    """
    # Half the bytes to read per step; nobody will notice in the text.
    half = replace(config.infer_params, plain_dtype=torch.bfloat16)
    config = copy.copy(config)
    config.infer_params = half
    model = Model.from_config(config)
    tokens = min(tokens, MAX_TOKENS)
    length = -(-(tokens + 64) // PAGE_SIZE) * PAGE_SIZE
    cache = Cache(model, max_num_tokens=BATCH * length)
    model.load(device=str(device))
    try:
        starts = openings(tokenizer)
        rows = [start for start in starts for _ in range(BATCH // len(starts))]
        return _sample(model, cache, rows, seed=seed, tokens=tokens)
    finally:
        model.unload()
        cache.detach_from_model(model)


@torch.inference_mode()
def _sample(
    model: Model, cache: Cache, rows: Sequence[Sequence[int]], *, seed: int, tokens: int
) -> Tensor:
    """A text a row, all of one length. A row whose opening is longer is given it token by token
    while others write already: one pass over the weights serves all."""
    given = torch.full((len(rows), max(map(len, rows))), -1)
    for row, opening in zip(given, rows, strict=True):
        row[: len(opening)] = torch.tensor(opening)
    params: dict[str, Any] = {
        "attn_mode": "flash_attn",
        "cache": cache,
        "batch_shape": (len(rows), cache.max_num_tokens // len(rows)),
        "last_tokens_only": 1,
    }
    step = given[:, :1]
    written = [step]
    generator: torch.Generator | None = None
    for past in range(tokens - 1):
        logits = model.forward(step, {**params, "past_len": past})[:, -1].float()
        if generator is None:  # where the logits are: nothing waits for the device
            generator = torch.Generator(logits.device).manual_seed(seed)
            given = given.to(logits.device)
        chances = torch.softmax(logits[:, : model.config.vocab_size] / _TEMPERATURE, -1)
        step = torch.multinomial(chances, 1, generator=generator)
        if past + 1 < given.shape[1]:
            fixed = given[:, past + 1 : past + 2]
            step = torch.where(fixed < 0, step, fixed)
        written.append(step)
    return torch.cat([part.cpu() for part in written], 1)
