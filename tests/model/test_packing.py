"""Weights of a loaded model lie in one buffer, and the model computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3 import Config, Model
from exl3.model import packing
from exl3.modules.linear import Linear

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"


@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_same_logits_from_packed_weights(monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
    ids = torch.arange(2, 40).view(1, -1)
    logits = []
    for packed in (False, True):
        monkeypatch.setattr(packing, "GROUP_BYTES", group_bytes)
        if not packed:
            monkeypatch.setattr(packing.WeightPacker, "add", lambda self, module: None)
        model = Model.from_config(Config.from_directory(str(GOLDEN)))
        model.load(device="cpu")
        logits.append(model.forward(ids))
        layers = [m for m in model if isinstance(m, Linear)]
        buffers = {m.weight.planes.untyped_storage().data_ptr() for m in layers if m.weight}
        if packed:
            assert len(buffers) == (1 if group_bytes > 1 else len(model.modules) - 2)
        model.unload()
        monkeypatch.undo()
    assert torch.equal(*logits)
