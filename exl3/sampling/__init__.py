"""Sampling: from a row of logits to a token id, in steps."""

from .adaptive import SS_XTC, SS_AdaptiveP, SS_Mirostat, xtc_default_protected_token_ids
from .base import Sampler, SS_Base
from .chain import CustomSampler
from .dry import SS_DRY
from .more import (
    SS_AllowTokens,
    SS_BanEOS,
    SS_DynaTemp,
    SS_Smoothing,
    SS_TopA,
    SS_TopNSigma,
    SS_TypicalP,
)
from .penalties import SS_PresFreqP, SS_RepP
from .presets import (
    AdaptivePSampler,
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    DefaultSampler,
    GreedySampler,
    GumbelSampler,
    MoreSteps,
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
    "SS_DRY",
    "SS_XTC",
    "AdaptivePSampler",
    "ArgmaxSampler",
    "CategoricalSampler",
    "ComboSampler",
    "CustomSampler",
    "DefaultSampler",
    "GreedySampler",
    "GumbelSampler",
    "MoreSteps",
    "NothingToSampleError",
    "SS_AdaptiveP",
    "SS_AllowTokens",
    "SS_Argmax",
    "SS_BanEOS",
    "SS_BanTokens",
    "SS_Base",
    "SS_DynaTemp",
    "SS_LogitBias",
    "SS_MinP",
    "SS_Mirostat",
    "SS_NoOp",
    "SS_Normalize",
    "SS_PresFreqP",
    "SS_RepP",
    "SS_Sample",
    "SS_Sample_mn",
    "SS_Smoothing",
    "SS_Sort",
    "SS_Temperature",
    "SS_TopA",
    "SS_TopK",
    "SS_TopNSigma",
    "SS_TopP",
    "SS_TypicalP",
    "Sampler",
    "SamplingState",
    "TopKSampler",
    "TopPSampler",
    "xtc_default_protected_token_ids",
]
