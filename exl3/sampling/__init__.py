"""Sampling: from a row of logits to a token id, in steps."""

from .adaptive import SS_XTC, SS_AdaptiveP, xtc_default_protected_token_ids
from .base import Sampler, SS_Base
from .chain import CustomSampler
from .penalties import SS_PresFreqP, SS_RepP
from .presets import (
    AdaptivePSampler,
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    DefaultSampler,
    GreedySampler,
    GumbelSampler,
    TopKSampler,
    TopPSampler,
)
from .state import SS, NothingToSampleError, SamplingState
from .steps import (
    SS_Argmax,
    SS_BanTokens,
    SS_LogitBias,
    SS_MinP,
    SS_NoOp,
    SS_Normalize,
    SS_Sample,
    SS_Sample_mn,
    SS_Sort,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
)

__all__ = [
    "SS",
    "SS_XTC",
    "AdaptivePSampler",
    "ArgmaxSampler",
    "CategoricalSampler",
    "ComboSampler",
    "CustomSampler",
    "DefaultSampler",
    "GreedySampler",
    "GumbelSampler",
    "NothingToSampleError",
    "SS_AdaptiveP",
    "SS_Argmax",
    "SS_BanTokens",
    "SS_Base",
    "SS_LogitBias",
    "SS_MinP",
    "SS_NoOp",
    "SS_Normalize",
    "SS_PresFreqP",
    "SS_RepP",
    "SS_Sample",
    "SS_Sample_mn",
    "SS_Sort",
    "SS_Temperature",
    "SS_TopK",
    "SS_TopP",
    "Sampler",
    "SamplingState",
    "TopKSampler",
    "TopPSampler",
    "xtc_default_protected_token_ids",
]
