"""The demo model, unquantised, says what Transformers makes of the same weights."""

from __future__ import annotations

import pytest
import torch

from exl3 import Cache, Config, Model, Tokenizer
from exl3.loader.fetch import fetch_demo_model

NEW_TOKENS = 24
QUESTION = (
    "<|im_start|>user\nWhat is the capital of France, and why is it famous?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.mark.slow
def test_greedy_text_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = Config.from_directory(str(fetch_demo_model()))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**config.config_dict, "dtype": "float32"})
    ).eval()
    names = config.stc.list("")
    weights = {key: config.stc.get(key, dtype=torch.float32) for key in names}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    theirs.tie_weights()

    model = Model.from_config(config)
    cache = Cache(model, 512)
    model.load()
    tokenizer = Tokenizer.from_config(config)
    ids = tokenizer.encode(QUESTION, encode_special_tokens=True)
    with torch.inference_mode():
        expected = theirs(ids).logits
    torch.testing.assert_close(model.forward(ids), expected, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        expected_ids = theirs.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)

    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, 512)}
    model.prefill(ids[:, :-1], params)
    own = ids
    while own.shape[1] < expected_ids.shape[1]:
        logits = model.forward(own[:, -1:], {**params, "past_len": own.shape[1] - 1})
        own = torch.cat([own, logits[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(own, expected_ids)
    assert "Paris" in tokenizer.decode(own)[0]
