"""Small GGUF files for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and 12345 dogs jump back in 2024.",
    "def main(args):\n    return [x for x in args if x > 10]  # it's we're they'll\n",
    "Größe, naïve café, Ελληνικά, русский язык, 中文字符, 🎉🎉 👩‍👩‍👧\r\n\r\n  two\t\ttabs",
] * 4
CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NORMAL, UNKNOWN, CONTROL_TYPE, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# head_count, head_count_kv, hidden, intermediate of the models written here
HEADS, KV_HEADS, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 64, 96, 2
HEAD_DIM = HIDDEN // HEADS


@dataclass
class Vocabulary:
    """What goes into the tokenizer.ggml.* keys."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None
    flags: dict[str, bool] = field(default_factory=dict)


def _trained(tokenizer: Tokenizer, **options: Any) -> tuple[list[str], list[tuple[str, str]]]:
    trainer = trainers.BpeTrainer(special_tokens=CONTROL, show_progress=False, **options)
    tokenizer.train_from_iterator(TEXT, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [tuple(merge) for merge in model["merges"]]


def byte_level(pre: str | None = "smollm", **flags: bool) -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens, merges = _trained(tokenizer, vocab_size=420, initial_alphabet=alphabet)
    types = [CONTROL_TYPE] * len(CONTROL) + [NORMAL] * (len(tokens) - len(CONTROL))
    return Vocabulary(
        "gpt2",
        [*tokens, "<tool>"],
        [*types, USER_DEFINED],
        merges=[" ".join(merge) for merge in merges],
        pre=pre,
        flags=flags,
    )


def sentencepiece(**flags: bool) -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    learnt, _ = _trained(tokenizer, vocab_size=260)
    pieces = [piece for piece in learnt if piece not in CONTROL]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*CONTROL, *byte_pieces, *pieces, "<tool>"]
    types = [UNKNOWN] + [CONTROL_TYPE] * 4 + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    scores = [0.0] * 261 + [-float(i) for i in range(len(pieces))] + [0.0]
    return Vocabulary("llama", tokens, types, scores=scores, flags=flags)


Alter = Callable[[GGUFWriter], None]


def write_gguf(
    path: Path,
    vocabulary: Vocabulary,
    *,
    arch: str = "llama",
    tensors: dict[str, torch.Tensor] | None = None,
    alter: Alter | None = None,
) -> Path:
    """Write a file; `tensors` under GGUF names, float32."""
    writer = GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch == "llama":
        writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for name, flag in vocabulary.flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    if alter is not None:
        alter(writer)
    for name, tensor in (tensors or {"token_embd.weight": torch.ones(2, HIDDEN)}).items():
        writer.add_tensor(name, tensor.numpy())
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_raw(writer: GGUFWriter, name: str, data: np.ndarray, kind: GGMLQuantizationType) -> None:
    writer.add_tensor(name, data, raw_dtype=kind)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """From the two halves of RoPE pairs to neighbours: how llama.cpp stores q and k."""
    rows = weight.shape[0] // heads
    out = torch.empty_like(weight)
    for head in range(heads):
        for i in range(rows // 2):
            out[head * rows + 2 * i] = weight[head * rows + i]
            out[head * rows + 2 * i + 1] = weight[head * rows + rows // 2 + i]
    return out
