"""Random adapters as PEFT writes them, and weights with an adapter merged in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exl3 import Model
from exl3.modules import Linear

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PeftAdapter:
    """`pairs`: layer key -> (A (r, in), B (out, r)), and the configuration beside them."""

    def __init__(
        self,
        model: Model,
        targets: tuple[str, ...] = ALL,
        rank: int = 4,
        seed: int = 0,
        size: float = 0.1,
        **config: Any,
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        self.config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
        self.config |= {"target_modules": list(targets), **config}
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        layers = {layer.key: layer for layer in model if isinstance(layer, Linear)}
        for key, layer in layers.items():
            if key.rpartition(".")[2] in targets:
                a = torch.randn(rank, layer.in_features, generator=source) * layer.in_features**-0.5
                b = torch.randn(layer.out_features, rank, generator=source) * size
                self.pairs[key] = (a, b)

    def scale(self) -> float:
        rank = self.config["r"]
        power = math.sqrt(rank) if self.config.get("use_rslora") else rank
        return self.config["lora_alpha"] / power

    def delta(self, key: str) -> torch.Tensor:
        """What is added to the weight (out, in)."""
        a, b = self.pairs[key]
        return self.scale() * (b @ a)

    def tensors(self, infix: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {
            f"base_model.model.{key}.lora_{half}{infix}.weight": tensor.to(dtype)
            for key, pair in self.pairs.items()
            for half, tensor in zip("AB", pair, strict=True)
        }

    def save(self, root: Path, name: str = "adapter", tensors: Any = None) -> Path:
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(tensors or self.tensors(), directory / "adapter_model.safetensors")
        return directory


def merge(model: Model, *adapters: PeftAdapter) -> None:
    """Add adapters to the weights of a plain model; `merge` what is left is up to the caller."""
    for layer in {id(m): m for m in model if isinstance(m, Linear)}.values():
        for adapter in adapters:
            if layer.key in adapter.pairs:
                assert layer.plain is not None
                layer.plain = layer.plain + adapter.delta(layer.key).to(layer.plain.dtype)
