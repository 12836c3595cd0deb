"""Calibration tokens: exactly rows x cols ids from a source that the output records.

The default is a seeded mix that ships no text: English and source code found on every Python
installation, text that the model itself writes, and random tokens.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..model import Config, Model
from ..tokenizer import Tokenizer
from .corpus import dataset_texts, prose, source_code, user_texts
from .self_text import BATCH, MAX_TOKENS, can_sample, sample_text

logger = logging.getLogger(__name__)

_CHARACTERS = 6  # per token, generously: so much text is read for so many tokens
_MIN_SAMPLED = 64  # shorter texts are mostly beginnings
_SHARES = {"sampled": 0.25, "random": 0.04, "code": 0.25}  # the rest is prose


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to calibrate on."""

    rows: int
    cols: int
    seed: int = 0
    cal_data: str | None = None
    cal_dataset: str | None = None
    device: str = "cpu"
    """Where the model writes its own text."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The tokens and where they came from."""

    input_ids: Tensor
    """int64 (rows, cols)."""
    record: dict[str, Any]


def make_calibration(config: Config, plan: CalibrationPlan) -> Calibration:
    """Calibration tokens as planned; the same for the same plan, model, Python installation and
    kind of device.

    Raises:
        ConfigError: no tokenizer, or no text where the plan says there is some.
    """
    tokenizer = Tokenizer(config)
    if plan.cal_data is not None:
        source = f"files: {plan.cal_data}"
        ids = _own_rows(tokenizer, user_texts(plan.cal_data), plan, config.vocab_size)
    elif plan.cal_dataset is not None:
        source = f"data set: {plan.cal_dataset}"
        texts = dataset_texts(plan.cal_dataset, plan.rows * plan.cols * _CHARACTERS)
        ids = _own_rows(tokenizer, texts, plan, config.vocab_size)
    else:
        ids, source = _default_rows(config, tokenizer, plan)
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    record = {"source": source, "seed": plan.seed, "ids_sha256": digest}
    return Calibration(ids, record)


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text by itself: BOS for most models that have one."""
    plain = tokenizer.encode("a")[0].tolist()
    full = tokenizer.encode("a", encode_special_tokens=True)[0].tolist()
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


def _stream(tokenizer: Tokenizer, texts: Sequence[str], vocab: int) -> Tensor:
    """All texts one after another, int64 (n,), between them what separates documents."""
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = []
    for text in texts:
        ids = tokenizer.encode(text, literal_special=True)[0].tolist()
        parts.append(torch.tensor([*ids, *separator], dtype=torch.int64))
    stream = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return stream[stream < vocab]


def _cut(stream: Tensor, start: int, size: int) -> Tensor:
    """`size` ids from `start` on, wrapping round."""
    return stream[(start + torch.arange(size)) % len(stream)]


def _with_prefix(row: Tensor, prefix: Sequence[int]) -> Tensor:
    head = torch.tensor(list(prefix), dtype=torch.int64)[: len(row)]
    return torch.cat([head, row[: len(row) - len(head)]])


def _own_rows(
    tokenizer: Tokenizer, texts: Sequence[str], plan: CalibrationPlan, vocab: int
) -> Tensor:
    """Rows spread evenly over the texts; texts that are too short come round again."""
    stream = _stream(tokenizer, texts, vocab)
    if not len(stream):
        raise ConfigError("the calibration text has no tokens that this model knows")
    needed = plan.rows * plan.cols
    if len(stream) < needed:
        logger.warning(
            "calibration text has %d tokens for %d x %d: it is used more than once",
            len(stream),
            plan.rows,
            plan.cols,
        )
    stride = max(plan.cols, (len(stream) - plan.cols) // max(plan.rows - 1, 1))
    prefix = _prefix(tokenizer)
    return torch.stack(
        [_with_prefix(_cut(stream, r * stride, plan.cols), prefix) for r in range(plan.rows)]
    )


def _default_rows(
    config: Config, tokenizer: Tokenizer, plan: CalibrationPlan
) -> tuple[Tensor, str]:
    kinds = _kinds(config, plan)
    size = plan.cols * _CHARACTERS
    texts = {
        "prose": prose(plan.seed, size * kinds.count("prose")),
        "code": source_code(plan.seed, size * kinds.count("code")),
    }
    streams = {kind: _stream(tokenizer, [text], config.vocab_size) for kind, text in texts.items()}
    sampled = kinds.count("sampled")
    if sampled:
        length = max(-(-sampled * plan.cols // BATCH), _MIN_SAMPLED)
        own = sample_text(
            config,
            tokenizer,
            seed=plan.seed,
            tokens=min(length, MAX_TOKENS),
            device=plan.device,
        )
        streams["sampled"] = own.reshape(-1)
    prefix = _prefix(tokenizer)
    counters = dict.fromkeys(kinds, 0)
    rows = []
    for index, kind in enumerate(kinds):
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        if kind == "random" or not len(streams[kind]):
            ids = torch.randint(config.vocab_size, (plan.cols,), generator=generator)
            rows.append(ids)
            continue
        stream = streams[kind]
        start = counters[kind] * plan.cols
        counters[kind] += 1
        row = _cut(stream, start, plan.cols)
        rows.append(row if kind == "sampled" else _with_prefix(row, prefix))
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return torch.stack(rows), f"default mix ({counts} rows)"


def _kinds(config: Config, plan: CalibrationPlan) -> list[str]:
    """The kind of every row, spread evenly."""
    sampled = min(round(_SHARES["sampled"] * plan.rows), BATCH * MAX_TOKENS // plan.cols)
    if sampled and not can_sample(Model.from_config(config)):
        logger.info("no text is sampled from the model itself: it is too large for that here")
        sampled = 0
    random = round(_SHARES["random"] * plan.rows)
    code = round(_SHARES["code"] * plan.rows)
    kinds = ["sampled"] * sampled + ["random"] * random + ["code"] * code
    kinds += ["prose"] * (plan.rows - len(kinds))
    order = torch.randperm(plan.rows, generator=torch.Generator().manual_seed(plan.seed)).tolist()
    return [kinds[i] for i in order]
