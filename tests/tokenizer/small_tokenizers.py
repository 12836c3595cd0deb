"""Small tokenizers of the kinds that models use, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from exl3.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog jumps back.",
    "def main(args):\n    return [x for x in args if x > 10]\n",
    "Größe, naïve café, Ελληνικά, русский язык, 中文字符, 日本語, 한국어",
    "🎉🎉 👩‍👩‍👧 ok!  two  spaces   three\t\ttabs\r\n\r\n12345 3.14159",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@dataclass
class FakeConfig:
    """What the tokenizer reads of a model's config."""

    directory: str
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id_list: list[int] = field(default_factory=list)
    image_token_id: int | None = None


def byte_level_bpe() -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def spm_bpe() -> HfTokenizer:
    """Llama-2-like: byte fallback, a space in front of the text."""
    learnt = HfTokenizer(models.BPE(unk_token="<unk>"))
    learnt.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL[:3], show_progress=False)
    learnt.train_from_iterator([t[:60] for t in TEXT[:2]], trainer)
    model = json.loads(learnt.to_str())["model"]
    pieces = SPECIAL[:3] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [p for p in model["vocab"] if p not in pieces]
    tokenizer = HfTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = learnt.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace_unigram() -> HfTokenizer:
    """T5-like: a Unigram model with a Metaspace decoder."""
    tokenizer = HfTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def gemma_like() -> HfTokenizer:
    """Byte fallback without a space in front: nothing is stripped."""
    tokenizer = spm_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level_bpe,
    "spm": spm_bpe,
    "metaspace": metaspace_unigram,
    "gemma": gemma_like,
}


Make = Callable[..., Tokenizer]
