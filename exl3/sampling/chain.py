"""`CustomSampler`: runs steps in order."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .base import Sampler, SS_Base, tensor_row
from .state import SS, FloatRow, IdRow, NothingToSampleError, Row, SamplingState
from .steps import SS_Argmax, SS_NoOp


def _checked(steps: Sequence[SS_Base]) -> list[SS_Base]:
    """The steps that do something, in order.

    Raises:
        ConfigError: a step in the wrong place, or not exactly one final step, last.
    """
    if not isinstance(steps, Iterable):
        raise ConfigError(f"CustomSampler: steps is {steps!r:.60}, expected a list of steps")
    chosen: list[SS_Base] = []
    for step in steps:
        if not isinstance(step, SS_Base):
            raise ConfigError(f"sampler step {step!r}: expected an object derived from SS_Base")
        replacement = step.alt()
        step = step if replacement is None else replacement
        if type(step) is not SS_NoOp:
            chosen.append(step)
    state, last = SS.INIT, None
    for step in chosen:
        name = type(step).__name__
        if last is not None and last.is_final():
            raise ConfigError(f"{name} comes after {type(last).__name__}, which must be last")
        if step.needs_logits() and state not in (SS.INIT, SS.LOGITS):
            raise ConfigError(
                f"{name} needs logits and must come before {type(last).__name__} and every other "
                "step that cuts the distribution"
            )
        for plumbing in step.prep(state) or []:
            state = plumbing().out_state(state)
        state, last = step.out_state(state), step
    if last is None or not (last.is_final() or last.is_custom()):
        raise ConfigError(
            "the last step must choose a token: SS_Argmax, SS_Sample, SS_Sample_mn or SS_AdaptiveP"
        )
    return chosen


class CustomSampler(Sampler):
    """Sampler made of steps."""

    def __init__(self, steps: Sequence[SS_Base]) -> None:
        self.steps = _checked(steps)
        self.reqs_past_ids = any(step.reqs_past_ids() for step in self.steps)
        self.reqs_torch_seed = any(step.reqs_torch_seed() for step in self.steps)

    @property
    def is_greedy(self) -> bool:
        """True if the sampler is nothing but argmax."""
        return len(self.steps) == 1 and type(self.steps[0]) is SS_Argmax

    def clone(self) -> CustomSampler:
        """A sampler with the same steps and its own memory."""
        twin = copy.copy(self)
        twin.steps = [copy.copy(step) for step in self.steps]
        return twin

    def memory(self) -> tuple[Any, ...] | None:
        """What the steps remember of the tokens drawn; None if nothing."""
        kept = tuple(step.memory() for step in self.steps)
        return kept if any(item is not None for item in kept) else None

    def restore(self, memory: tuple[Any, ...] | None) -> None:
        """Forget the draws since `memory` gave this."""
        for step, item in zip(self.steps, memory or (), strict=False):
            if item is not None:
                step.restore(item)

    def forward(
        self,
        logits: Tensor,
        sequence_ids: Tensor | None = None,
        rand_u32: int | None = None,
        tokenizer: Any = None,
        logit_mask: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """See `Sampler.forward`. With `return_state`: the `SamplingState` (of the last row)."""
        key = random.getrandbits(32) if rand_u32 is None else int(rand_u32)
        flat = logits.detach().reshape(-1, logits.shape[-1]).to("cpu", torch.float32).numpy()
        width = flat.shape[1]
        if tokenizer is not None:
            width = min(width, tokenizer.actual_vocab_size)
        allowed = None if logit_mask is None else _mask_row(logit_mask, width)
        past = None
        if self.reqs_past_ids and sequence_ids is not None:
            past = sequence_ids.reshape(-1).numpy()
        ids, state = [], None
        for index in range(flat.shape[0]):
            row = _row(flat[index, :width], key + index, past, allowed)
            state = self._run(row, flat[index], return_state)
            ids.append(row.sample)
        if return_state:
            return state
        return torch.tensor(ids, dtype=torch.long).reshape(logits.shape[:-1])

    def draw(
        self, logits: FloatRow, *, key: int, past_ids: IdRow | None, mask: Tensor | None
    ) -> int:
        """`forward` for one row (V,) of the vocabulary's width, without tensors around it."""
        allowed = None if mask is None else _mask_row(mask, logits.size)
        row = _row(logits, key, past_ids if self.reqs_past_ids else None, allowed)
        self._run(row, logits, False)
        return row.sample

    def _run(self, row: Row, in_logits: FloatRow, return_state: bool) -> SamplingState | None:
        for step in self.steps:
            if step.is_custom():
                _run_custom(step, row, in_logits)
            else:
                step.apply(row)
        if row.sample < 0:
            raise NothingToSampleError("the last step of the sampler chose no token")
        if not return_state:
            return None
        state = _to_state(row, in_logits, SS.PROBS_N_S if row.ids is not None else SS.LOGITS)
        state.sample, state.state = torch.tensor([row.sample]), SS.DONE
        return state


def _row(logits: FloatRow, key: int, past_ids: IdRow | None, mask: Any) -> Row:
    if mask is None:
        return Row(logits, logits.size, key, past_ids)
    return Row(_masked(logits, mask), logits.size, key, past_ids, shared=False)


def _mask_row(mask: Tensor, width: int) -> FloatRow | IdRow:
    """A mask as float32 to add, or bool of allowed columns; (width,) or shorter."""
    flat = mask.reshape(-1)
    if mask.dtype == torch.int32:
        bits = np.unpackbits(flat.numpy().view(np.uint8), bitorder="little")
        return bits[:width].view(bool)
    if not mask.is_floating_point():
        raise ShapeError(f"logit_mask: dtype {mask.dtype}, expected float16 or packed int32")
    return flat[:width].to(torch.float32).numpy()


def _masked(logits: FloatRow, mask: Any) -> FloatRow:
    """A new row with the mask applied; columns beyond it are -inf."""
    out = np.full(logits.size, -np.inf, np.float32)
    inner = logits[: mask.size]
    if mask.dtype == bool:
        np.copyto(out[: mask.size], inner, where=mask)
    else:
        np.add(inner, mask, out=out[: mask.size])
    return out


def _to_state(row: Row, in_logits: FloatRow, form: SS) -> SamplingState:
    """The row as a custom step wants to see it."""
    past = None if row.past_ids is None else tensor_row(row.past_ids)
    state = SamplingState(row.key, 1, row.vocab_size, tensor_row(in_logits), past_ids=past)
    state.state = form
    if form.is_sorted:
        order = np.argsort(-row.logits, kind="stable")
        state.indices = tensor_row(row.token_ids()[order])
    elif row.ids is not None:
        dense = np.full(row.vocab_size, -np.inf, np.float32)
        dense[row.ids] = row.logits
        row.logits, row.ids, row.shared = dense, None, False
        order = np.arange(dense.size)
    else:
        order = np.arange(row.logits.size)
    if form.has_logits:
        state.logits = tensor_row(row.logits[order])
    else:
        state.probs = tensor_row(row.probs()[order])
    return state


def _run_custom(step: SS_Base, row: Row, in_logits: FloatRow) -> None:
    form = SS.INIT if row.shared else SS.LOGITS if row.ids is None else SS.PROBS_N_S
    for plumbing in step.prep(form) or []:
        form = plumbing().out_state(form)
    state = _to_state(row, in_logits, form)
    step.run(state)
    if state.state is SS.DONE:
        if state.sample is None:
            raise ConfigError(f"{type(step).__name__}: state is DONE but `sample` is None")
        row.sample = int(state.sample.reshape(-1)[0])
        return
    values = state.logits if state.state.has_logits else state.probs
    if values is None:
        raise ConfigError(f"{type(step).__name__}: {state.state.name}, but its tensor is None")
    array = values.reshape(-1).to("cpu", torch.float32).numpy().copy()
    if not state.state.has_logits:
        with np.errstate(divide="ignore"):
            array = np.log(array)
    row.logits, row.shared = array, False
    row.ids = None
    if state.state.is_sorted:
        if state.indices is None:
            raise ConfigError(f"{type(step).__name__}: sorted state, but `indices` is None")
        row.ids = state.indices.reshape(-1).to("cpu", torch.long).numpy()
