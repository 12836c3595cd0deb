"""Quantising linear layers to EXL3."""

from .hessian import Hessian, HessianAccumulator
from .quantize import QuantizedLinear, check_weight, quantize_group
from .types import LinearJob, LinearReport, QuantizedTensors, QuantizeOptions

__all__ = [
    "Hessian",
    "HessianAccumulator",
    "LinearJob",
    "LinearReport",
    "QuantizeOptions",
    "QuantizedLinear",
    "QuantizedTensors",
    "check_weight",
    "quantize_group",
]
