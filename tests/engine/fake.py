"""A model whose logits depend on every slot of the cache that the sequence may see.

Each slot holds a running hash of the tokens up to it, so a wrong page, a stale slot or a wrong
position changes the logits, and reading a slot that was never written is an error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from exl3.tokenizer.pieces import Lead

PAGE = 256
PAGE_BYTES = PAGE * 8  # of a FakeCache
M1, M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
MASK = (1 << 64) - 1


def mix(value: int) -> int:
    value = (value ^ (value >> 31)) * int(M2) & MASK
    return value ^ (value >> 29)


class Pieces:
    """What `StreamDecoder` reads of a tokenizer."""

    lead = Lead.KEEP

    def __init__(self, data: list[bytes]) -> None:
        self.bytes = data

    def shown(self, token: int, *, decode_special: bool) -> bool:
        return decode_special or token > 2


class FakeTokenizer:
    """Bytes, a few joined pieces, and three special tokens: 0 BOS, 1 EOS, 2 `<|im_end|>`."""

    special = ("<s>", "</s>", "<|im_end|>")
    joined = (
        b"ab",
        b"abc",
        b" the",
        b"\xc3",
        b"\xa9\xe2\x82",
        b"\xac!",
        b"stop",
        b"foo bar",
        b"\n",
    )

    def __init__(self) -> None:
        pieces = [bytes([b]) for b in range(256)]
        special = [piece.encode() for piece in self.special]
        self.bytes = special + pieces + list(self.joined)
        self.piece_table = Pieces(self.bytes)
        self.actual_vocab_size = len(self.bytes)
        self.raw_vocab_size = self.actual_vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = 0, 1, None
        self.extended_id_to_piece = dict(enumerate(self.special))
        self.extended_piece_to_id = {piece: i for i, piece in enumerate(self.special)}
        self.config = SimpleNamespace(eos_token_id_list=[1])
        shown = [b.decode("utf-8", "replace") for b in self.bytes]
        self._pieces = {False: ["", "", "", *shown[3:]], True: [*self.special, *shown[3:]]}

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return self._pieces[include_special_tokens]

    def get_tokens_with_prefix_id(self, token: int) -> list[int]:
        start = self.bytes[token]
        return [i for i, piece in enumerate(self.bytes) if i > 2 and piece.startswith(start)]

    def encode(self, text, add_bos=False, encode_special_tokens=False, embeddings=None, **_):
        out = [0] if add_bos else []
        return torch.tensor([out + [3 + b for b in text.encode()]], dtype=torch.long)

    def decode(self, ids, decode_special_tokens: bool = False):
        if ids.dim() == 2:
            return [self.decode(row, decode_special_tokens) for row in ids]
        parts = []
        for i in ids.tolist():
            if i > 2 or decode_special_tokens:
                parts.append(self.bytes[i])
        return b"".join(parts).decode("utf-8", "replace")

    def single_id(self, text):
        return self.extended_piece_to_id.get(text)


class FakeCache:
    def __init__(self, model, max_num_tokens: int) -> None:
        self.model, self.max_num_tokens = model, max_num_tokens
        self.slots = np.zeros((max_num_tokens // PAGE, PAGE), np.uint64)  # 0: never written
        self.copies = 0

    def page_tensors(self, page: int) -> list[torch.Tensor]:
        return [torch.from_numpy(self.slots[page].view(np.int64))]

    def page_format(self) -> str:
        return "fake"

    def copy_page(self, target, from_page: int, to_page: int, num_tokens: int) -> None:
        assert from_page != to_page
        target.slots[to_page, :num_tokens] = self.slots[from_page, :num_tokens]
        target.slots[to_page, num_tokens:] = 0
        self.copies += 1


class FakeModel:
    """`letters`: if given, only these bytes (and the specials) get high logits."""

    def __init__(self, letters: bytes = b"", eos_bias: float = -8.0, spread: float = 6.0) -> None:
        self.tokenizer = FakeTokenizer()
        vocab = self.tokenizer.actual_vocab_size
        self.width = (vocab + 127) // 128 * 128
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=1 << 20)
        self.caps: dict = {}
        self.loaded = True
        self.spread = spread
        self.bias = np.zeros(self.width, np.float32)
        self.bias[vocab:] = 99.0  # padding must never be drawn
        self.bias[:3] = eos_bias
        if letters:
            self.bias[3:vocab] -= 50.0
            for i, piece in enumerate(self.tokenizer.bytes):
                if i > 2 and all(b in letters for b in piece):
                    self.bias[i] += 50.0
        self.weights = np.cumprod(np.full(1 << 16, M1, np.uint64)) | np.uint64(1)
        self.columns = np.arange(self.width, dtype=np.uint64) * M2
        self.forwards: list[tuple[int, int]] = []
        self.fail_next: Exception | None = None

    def fingerprint(self) -> str:
        return "fake"

    def logits_of(self, context: np.ndarray) -> np.ndarray:
        """Logits after a context of slot values."""
        seen = int((context * self.weights[: context.size]).sum(dtype=np.uint64))
        noise = (self.columns + np.uint64(seen)) * M1
        noise ^= noise >> np.uint64(29)
        noise *= M2
        noise >>= np.uint64(40)
        return noise.astype(np.float32) * (self.spread / 2**24) + self.bias

    @staticmethod
    def values(previous: int, tokens) -> list[int]:
        out = []
        for token in tokens:
            previous = mix(previous + 31 * (int(token) + 7)) or 1
            out.append(previous)
        return out

    def first_value(self, params, row: int) -> int:
        """What the hash of a sequence starts from."""
        return 1

    def reference_logits(self, ids) -> np.ndarray:
        return self.logits_of(np.array(self.values(1, ids), np.uint64))

    def _run(self, input_ids, params, want: bool):
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert params["attn_mode"] == "flash_attn" and input_ids.dtype == torch.long
        cache, table = params["cache"], params["block_table"]
        lengths = params["cache_seqlens"]
        assert table.dtype == lengths.dtype == torch.int32
        bsz, count = input_ids.shape
        self.forwards.append((bsz, count))
        out = torch.empty(bsz, count, self.width)
        for row in range(bsz):
            start = int(lengths[row])
            pages = table[row].numpy()
            used = pages[: (start + count + PAGE - 1) // PAGE]
            assert len(used) * PAGE >= start + count, "the block table is too short"
            flat = cache.slots[used].reshape(-1)
            previous = int(flat[start - 1]) if start else self.first_value(params, row)
            assert (flat[:start] != 0).all(), "an unwritten slot was read"
            flat[start : start + count] = self.values(previous, input_ids[row].tolist())
            cache.slots[used] = flat.reshape(-1, PAGE)
            if want:
                for i in range(count):
                    out[row, i] = torch.from_numpy(self.logits_of(flat[: start + i + 1]))
        return out

    def prefill(self, input_ids, params=None) -> None:
        self._run(input_ids, params, False)

    def forward(self, input_ids, params=None):
        return self._run(input_ids, params, True)


class FakeDraft(FakeModel):
    """A draft model that agrees with `target` in all but some contexts. It has the first `vocab`
    tokens only, if that is given."""

    def __init__(self, target: FakeModel, wrong_percent: int = 0, vocab: int | None = None) -> None:
        super().__init__(spread=target.spread)
        self.bias = target.bias
        self.wrong_percent = wrong_percent
        self.config = SimpleNamespace(**vars(target.config))
        self.config.vocab_size = vocab or self.config.vocab_size

    def logits_of(self, context: np.ndarray) -> np.ndarray:
        logits = super().logits_of(context)
        return np.roll(logits, 1) if int(context[-1]) % 100 < self.wrong_percent else logits

    def _run(self, input_ids, params, want: bool):
        assert int(input_ids.max()) < self.config.vocab_size
        return super()._run(input_ids, params, want)


def drafting(model: FakeModel, pages: int, kind: str, **options) -> dict:
    """Arguments of a generator that drafts: `none`, `ngram` or `model`."""
    if kind == "none":
        return {}
    if kind == "ngram":
        return {"ngram_match_min": 1, **options}
    wrong, vocab = options.pop("wrong_percent", 0), options.pop("vocab", None)
    draft = FakeDraft(model, wrong, vocab)
    return {"draft_model": draft, "draft_cache": FakeCache(draft, pages * 256), **options}
