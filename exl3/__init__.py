"""exl3: quantise language models to EXL3 and run them. Importing needs no GPU or compiler.

Names are looked up at first use, so that `import exl3` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

from .version import __version__

# Module -> public names that it defines.
_BY_MODULE = {
    "model": "Config Model",
    "tokenizer": "Tokenizer MMEmbedding",
    "cache": "Cache CacheLayer_fp16 CacheLayer_quant",
    "generator": "Generator Job AsyncGenerator AsyncJob Filter FormatronFilter LLGuidanceFilter",
    "generator.sampler": """Sampler CustomSampler DefaultSampler ArgmaxSampler GreedySampler
        CategoricalSampler GumbelSampler TopKSampler TopPSampler ComboSampler AdaptivePSampler
        SS_Base SS_Argmax SS_Sample SS_Sample_mn SS_Temperature SS_TopK SS_TopP SS_MinP SS_XTC
        SS_RepP SS_PresFreqP SS_LogitBias SS_BanTokens SS_AdaptiveP SS_Normalize SS_Sort SS_NoOp
        SS_DRY SS_Mirostat SS_TypicalP SS_TopA SS_TopNSigma SS_DynaTemp SS_Smoothing SS_AllowTokens
        SS_BanEOS
        xtc_default_protected_token_ids""",
}
_MODULE_OF = {name: module for module, names in _BY_MODULE.items() for name in names.split()}

__all__ = ["__version__", "model_init"]
__all__ += list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "model_init":
        return importlib.import_module(".model_init", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
