"""Bases of samplers and of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .state import SS, Row, SamplingState


class Sampler(ABC):
    """Anything that turns logits into token ids."""

    reqs_past_ids: bool = False
    reqs_torch_seed: bool = False

    @abstractmethod
    def forward(
        self,
        logits: Tensor,
        sequence_ids: Tensor | None = None,
        rand_u32: int | None = None,
        tokenizer: Any = None,
        logit_mask: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """Token ids of shape `logits.shape[:-1]`.

        Args:
            logits: (..., V_pad), not modified.
            sequence_ids: long (1, n), all past ids with the prompt.
            rand_u32: key of the draw; None: a random one.
            tokenizer: columns from its `actual_vocab_size` on are never drawn.
            logit_mask: additive float16 (1, w) or packed int32 (1, w/32), bit set = allowed;
                columns beyond are masked.
            return_state: return the final `SamplingState` in place of the ids.
        """


class SS_Base:
    """One step. Built-in steps work on a `Row`; a custom step overrides `run`."""

    def apply(self, row: Row) -> None:
        """Change one row in place. Built-in steps override this."""
        raise UnsupportedError(f"{type(self).__name__}: neither `apply` nor `run` is defined")

    def run(self, state: SamplingState) -> None:
        """Change `state` in place; for custom steps."""
        raise UnsupportedError(f"{type(self).__name__}: neither `apply` nor `run` is defined")

    def prep(self, in_state: SS) -> list[type[SS_Base]] | None:
        """Plumbing steps wanted first, such as `[SS_Sort]`."""
        return None

    def alt(self) -> SS_Base | None:
        """A step to use in place of this one; `SS_NoOp()` for none."""
        return None

    def out_state(self, in_state: SS) -> SS:
        """What the step leaves behind, as far as that is known at construction."""
        return SS.LOGITS if in_state is SS.INIT else in_state

    def reqs_past_ids(self) -> bool:
        return False

    def reqs_torch_seed(self) -> bool:
        return False

    def memory(self) -> Any:
        """What the step remembers of the tokens drawn; None if nothing. Never changed in place."""
        return None

    def restore(self, memory: Any) -> None:
        """Back to what `memory` gave."""

    def needs_logits(self) -> bool:
        """True: must come before every step that cuts the distribution."""
        return False

    def is_final(self) -> bool:
        """True: chooses the token."""
        return False

    def is_custom(self) -> bool:
        """True: written against `SamplingState`."""
        return type(self).run is not SS_Base.run


def tensor_row(values: Any) -> Tensor:
    """A numpy row as a (1, n) tensor."""
    return torch.from_numpy(values).unsqueeze(0)
