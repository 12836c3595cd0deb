"""The three codebooks: how a 16-bit state becomes a weight."""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from ..errors import ConfigError

_3INST_MUL, _3INST_ADD = 89226354, 64248484
_PAIR_MASK, _PAIR_XOR = 0x8FFF8FFF, 0x3B603B60
_MUL1_SCALE, _MUL1_OFFSET, _MUL1_BIAS = 0x1EEE, 0xC931, 1024


class Codebook(IntEnum):
    """Codebook of one tensor; the number is what the compiled ops take."""

    INST3 = 0
    MCG = 1
    MUL1 = 2

    @property
    def label(self) -> str:
        """Name in `quantization_config`: 3inst, mcg or mul1."""
        return _LABELS[self]

    @classmethod
    def from_label(cls, label: str) -> Codebook:
        """The codebook called `label`.

        Raises:
            ConfigError: no such codebook.
        """
        for codebook, name in _LABELS.items():
            if name == label:
                return codebook
        known = ", ".join(_LABELS.values())
        raise ConfigError(f"codebook: expected one of {known}, got {label!r}")

    @property
    def multiplier(self) -> int | None:
        """What a file stores, as 32 bits, in the tensor named by the label; None: stores none."""
        return _MULTIPLIERS.get(self)

    @property
    def std(self) -> float:
        """Standard deviation over all states."""
        return _std(self)

    def values(self) -> Tensor:
        """float32 (65536,): the value of every state, exact (all are float16 numbers)."""
        return _values(self).clone()


_LABELS = {Codebook.INST3: "3inst", Codebook.MCG: "mcg", Codebook.MUL1: "mul1"}
_MULTIPLIERS = {Codebook.MCG: 0xCBAC1FED, Codebook.MUL1: 0x83DCD12D}


@cache
def _values(codebook: Codebook) -> Tensor:
    """Plain torch, from the format page, section 2. Only the last step rounds."""
    state = torch.arange(65536, dtype=torch.int64)
    multiplier = codebook.multiplier
    x = state * _3INST_MUL + _3INST_ADD if multiplier is None else state * multiplier
    x = x & 0xFFFFFFFF
    if codebook is Codebook.MUL1:
        total = ((x[:, None] >> torch.tensor([0, 8, 16, 24])) & 255).sum(-1)
        a, c = (_halves(torch.tensor(bits)).double() for bits in (_MUL1_SCALE, _MUL1_OFFSET))
        exact = (total + _MUL1_BIAS).double() * a + c
    else:
        x = (x & _PAIR_MASK) ^ _PAIR_XOR
        exact = _halves(x & 0xFFFF).double() + _halves(x >> 16).double()
    return exact.float().half().float()  # the exact values fit float32, so this rounds once


def _halves(bits: Tensor) -> Tensor:
    """float16 numbers with these bits."""
    return torch.where(bits >= 32768, bits - 65536, bits).to(torch.int16).view(torch.float16)


@cache
def _std(codebook: Codebook) -> float:
    return float(_values(codebook).double().std(unbiased=False))
