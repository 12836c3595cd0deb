"""Rotary frequencies of every variant against Transformers."""

from __future__ import annotations

import pytest
import torch

from exl3.model.rope_config import read_rope

HEAD_DIM = 64
SHORT = [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.9 * i for i in range(HEAD_DIM // 2)]
# Positions and length of the sequence, so that Transformers chooses the same factors.
POSITIONS = [0, 1, 8191, 99_999]
VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 4096,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("length", [2048, 100_000])
@pytest.mark.parametrize("name", VARIANTS)
def test_tables_equal_transformers(name: str, length: int) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**VARIANTS[name], "rope_theta": 500000.0}
    fields = {"max_position_embeddings": 16384, "rope_parameters": parameters}
    theirs = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=HEAD_DIM, **fields)
    kind = parameters["rope_type"]
    if kind == "default":
        rotary = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / 500000.0 ** (torch.arange(0, rotary, 2).double() / rotary)
        scale = 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    own, own_scale = read_rope(fields, HEAD_DIM, 16384, length).frequencies()
    assert own_scale == pytest.approx(scale, rel=1e-6)
    torch.testing.assert_close(own, inv_freq.float(), rtol=2e-6, atol=0)
    # At 100 k positions the float32 rounding of a frequency is an angle of at most 100 k * 2^-23.
    angle = torch.tensor(POSITIONS).double()[:, None] * own.double()
    expected = torch.tensor(POSITIONS).double()[:, None] * inv_freq.double()
    torch.testing.assert_close(angle.cos() * own_scale, expected.cos() * scale, rtol=0, atol=3e-2)
    near = torch.tensor(POSITIONS) < 10_000
    torch.testing.assert_close(angle.sin()[near], expected.sin()[near], rtol=0, atol=3e-3)


def test_longrope_by_length() -> None:
    fields = {"rope_scaling": {**VARIANTS["longrope"], "type": "longrope", "rope_type": None}}
    own = read_rope(fields, HEAD_DIM, 16384, None)
    short = read_rope(fields, HEAD_DIM, 16384, 4096)
    assert not torch.equal(own.frequencies()[0], short.frequencies()[0])
    assert own.frequencies()[1] == short.frequencies()[1] > 1
