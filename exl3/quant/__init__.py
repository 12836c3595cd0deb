"""Quantising linear layers to EXL3."""

from .hessian import Hessian, HessianAccumulator
from .output_hessian import OutputHessian
from .quantize import InputGroup, QuantizedLinear, check_weight, quantize_group, quantize_groups
from .types import LinearJob, LinearReport, QuantizedTensors, QuantizeOptions

__all__ = [
    "Hessian",
    "HessianAccumulator",
    "InputGroup",
    "LinearJob",
    "LinearReport",
    "OutputHessian",
    "QuantizeOptions",
    "QuantizedLinear",
    "QuantizedTensors",
    "check_weight",
    "quantize_group",
    "quantize_groups",
]
