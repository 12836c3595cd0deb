"""From `forward`'s arguments to a `Batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..constants import PAGE_SIZE
from ..errors import ConfigError, ShapeError, UnsupportedError
from ..modules import Batch

Params = Mapping[str, Any]

_KNOWN = frozenset(
    [
        "attn_mode",
        "cache",
        "batch_shape",
        "past_len",
        "block_table",
        "cache_seqlens",
        "position",
        "positions",
        "position_ids",
        "last_tokens_only",
        "loras",
        "reconstruct",
        "causal",
        "recurrent_states",
        "recurrent_history",
        "indexed_embeddings",
        "inv_freq",
        "mm_span_prefix",
        "export_state_layers",
        "export_state_norm_keys",
        "export_states",
    ]
)
_UNSUPPORTED = ("inv_freq", "export_state_layers", "export_state_norm_keys", "indexed_embeddings")


def given_params(input_ids: Any, params: Any) -> Params:
    """The parameters of a pass, None as none.

    Raises:
        ShapeError: ids that are no tensor.
        ConfigError: parameters that are no dict.
    """
    if not isinstance(input_ids, Tensor):
        raise ShapeError(
            f"input_ids is {type(input_ids).__name__}, expected a long tensor (bsz, q_len)"
        )
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise ConfigError(f"params is {type(params).__name__}, expected a dict or None")
    return params


def check_params(params: Params) -> str:
    """The attention mode, after checking that the keys fit together.

    Raises:
        ConfigError: unknown mode or key, or keys that exclude each other.
        UnsupportedError: a key that this version has no code for.
    """
    mode = params.get("attn_mode", "flash_attn_nc")
    if mode not in ("flash_attn", "flash_attn_nc"):
        raise ConfigError(f"attn_mode: expected flash_attn or flash_attn_nc, got {mode!r}")
    unknown = sorted(set(params) - _KNOWN)
    if unknown:
        raise ConfigError(f"params has unknown keys {unknown}; known are {sorted(_KNOWN)}")
    used = [key for key in _UNSUPPORTED if params.get(key) not in (None, [], ())]
    if used:
        raise UnsupportedError(f"params key {used[0]!r} is not supported by text models yet")
    if mode == "flash_attn_nc" and params.get("cache") is not None:
        raise ConfigError("attn_mode flash_attn_nc runs without a cache, but params has one")
    if mode == "flash_attn" and params.get("cache") is None:
        raise ConfigError("attn_mode flash_attn needs params['cache']")
    return mode


def check_cache(model: Any, cache: Any) -> None:
    """Check that the cache belongs to the model.

    Raises:
        ConfigError: it is attached to another model, or to none.
    """
    if cache.model is not model:
        raise ConfigError("params['cache'] is not attached to this model")


def check_ids(input_ids: Tensor, vocab: int) -> Tensor:
    """Ids int64 (bsz, q_len) within the vocabulary.

    Raises:
        ShapeError: another shape or dtype, or an id outside 0..vocab-1.
    """
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"input_ids must be a long tensor (bsz, q_len), got {input_ids.dtype} "
            f"{tuple(input_ids.shape)}"
        )
    if input_ids.numel():
        low, high = (int(v) for v in torch.aminmax(input_ids))
        if low < 0 or high >= vocab:
            raise ShapeError(f"input_ids has id {low if low < 0 else high}, outside 0..{vocab - 1}")
    return input_ids.to(torch.int64)


def make_batch(input_ids: Tensor, params: Params, mode: str) -> Batch:
    """The batch of one pass; `input_ids` checked by `check_ids`."""
    bsz, q_len = input_ids.shape
    if mode == "flash_attn_nc":
        batch = Batch.dense(bsz, q_len, positions=_positions(params, bsz, q_len, None))
    else:
        batch = _cached_batch(params, bsz, q_len)
    batch.input_ids = input_ids.reshape(-1).contiguous()
    batch.causal = bool(params.get("causal", True))
    batch.reconstruct = bool(params.get("reconstruct", False))
    last = params.get("last_tokens_only")
    if last and last < q_len:
        rows = torch.arange(bsz * q_len).reshape(bsz, q_len)
        batch.logit_rows = rows[:, q_len - int(last) :].reshape(-1)
    return batch


def _cached_batch(params: Params, bsz: int, q_len: int) -> Batch:
    cache = params["cache"]
    table, past = page_table(params, bsz)
    pages = cache.max_num_tokens // PAGE_SIZE
    total = past + q_len
    check_pages(table, total, pages)
    offsets = past.to(torch.int64)[:, None] + torch.arange(q_len)
    slots = table.to(torch.int64).gather(1, offsets // PAGE_SIZE) * PAGE_SIZE
    slots += offsets % PAGE_SIZE
    return Batch(
        bsz,
        q_len,
        _positions(params, bsz, q_len, past).reshape(-1).to(torch.int32),
        cache=cache,
        query_starts=torch.arange(bsz + 1, dtype=torch.int32) * q_len,
        seq_lens=total.to(torch.int32),
        page_table=table.to(torch.int32).contiguous(),
        slots=slots.reshape(-1),
        fresh=not bool(past.any()),
    )


def page_table(params: Params, bsz: int) -> tuple[Tensor, Tensor]:
    """Page table int32 (bsz, pages) and tokens already stored (bsz,), from either form.

    Raises:
        ConfigError: neither form is complete, or it does not fit batch and cache.
    """
    cache = params["cache"]
    if params.get("block_table") is not None:
        table, past = params["block_table"], params.get("cache_seqlens")
        if past is None or table.dim() != 2 or table.shape[0] != bsz or past.shape != (bsz,):
            raise ConfigError(
                f"block_table must be (bsz, pages) and cache_seqlens (bsz,) with bsz {bsz}, got "
                f"{tuple(table.shape)} and {None if past is None else tuple(past.shape)}"
            )
        return table, past
    shape, past_len = params.get("batch_shape"), params.get("past_len", 0)
    if shape is None:
        raise ConfigError("attn_mode flash_attn needs block_table or batch_shape in params")
    rows, max_len = shape
    if rows != bsz or max_len % PAGE_SIZE or rows * max_len > cache.max_num_tokens:
        raise ConfigError(
            f"batch_shape {tuple(shape)}: expected ({bsz}, multiple of {PAGE_SIZE}) and at most "
            f"{cache.max_num_tokens} tokens, the size of the cache"
        )
    per_row = max_len // PAGE_SIZE
    table = torch.arange(bsz * per_row, dtype=torch.int32).reshape(bsz, per_row)
    return table, torch.full((bsz,), int(past_len), dtype=torch.int32)


def check_pages(table: Tensor, total: Tensor, pages: int) -> None:
    """Check that every page in use exists; entries past those are never read.

    Args:
        total: tokens stored after this pass, (bsz,).
        pages: pages of the cache.
    """
    used = (total + PAGE_SIZE - 1) // PAGE_SIZE
    if int(used.max()) > table.shape[1] or int(total.min()) < 1:
        raise ConfigError(
            f"the page table has room for {table.shape[1] * PAGE_SIZE} tokens per sequence, "
            f"this pass ends at {int(total.max())}"
        )
    live = torch.arange(table.shape[1]) < used[:, None]
    bad = live & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        raise ConfigError(
            f"the page table has page {int(table[bad][0])}, the cache has 0..{pages - 1}"
        )


def _positions(params: Params, bsz: int, q_len: int, past: Tensor | None) -> Tensor:
    """int (bsz, q_len), from the first of the override keys that is given."""
    steps = torch.arange(q_len, dtype=torch.int32)
    if params.get("position_ids") is not None:
        given = torch.as_tensor(params["position_ids"])
        if given.shape != (bsz, q_len):
            raise ConfigError(
                f"position_ids must be {(bsz, q_len)}, the shape of input_ids, got "
                f"{tuple(given.shape)}"
            )
        return given
    if params.get("positions") is not None:
        given = torch.as_tensor(params["positions"])
        if given.shape != (bsz,):
            raise ConfigError(f"positions must be ({bsz},), got {tuple(given.shape)}")
        return given[:, None] + steps
    if params.get("position") is not None:
        return (int(params["position"]) + steps).expand(bsz, q_len)
    start = torch.zeros(bsz, dtype=torch.int32) if past is None else past
    return start[:, None] + steps
