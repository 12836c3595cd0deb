"""tokenizer.json, tokenizer_config.json and chat templates from GGUF metadata.

Agrees with what Transformers makes of the same file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from ...errors import FormatError, UnsupportedError
from .config import special_ids, token_list
from .header import GgufHeader

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"

# How text is cut before merging: the expressions of the families' own tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# GPT-2's own expression, which the byte-level step brings along.
_PLAIN = frozenset({None, "default", "gpt-2", "smollm"})


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer of the file.

    Raises:
        UnsupportedError: a kind other than byte-level BPE ("gpt2") and SentencePiece ("llama").
        FormatError: lists that do not fit each other.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedError(
            f"{header.path}: tokenizer of kind {kind!r}, supported are {', '.join(builders)}"
        )
    try:
        tokenizer = builders[kind](header)
    except (FormatError, UnsupportedError):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise FormatError(f"{header.path}: the tokenizer's lists do not fit: {error}") from error
    _add_tokens(tokenizer, header, byte_level=kind == "gpt2")
    _add_ends(tokenizer, header)
    return tokenizer


def _byte_level(header: GgufHeader) -> Tokenizer:
    vocab = {_spell(token): i for i, token in enumerate(token_list(header))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_stored_merges(header)))
    pre = header.metadata.get("tokenizer.ggml.pre")
    if pre in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        if pre not in _PLAIN:
            logger.warning(
                "%s: unknown pre-tokenizer %r; text is cut as for GPT-2, which may give other "
                "tokens than the model was trained with",
                header.path,
                pre,
            )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


def _spell(token: str) -> str:
    """A token in byte-level characters; most are already."""
    if _ALPHABET.issuperset(token):
        return token
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in pieces.pre_tokenize_str(token))


def _stored_merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise FormatError(f"{header.path}: no list of merges in tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ")) for merge in merges if isinstance(merge, str)]
    if len(pairs) != len(merges) or any(len(pair) != 2 for pair in pairs):
        raise FormatError(f"{header.path}: tokenizer.ggml.merges must be pairs of pieces")
    return [(left, right) for left, right in pairs]


def _sentencepiece(header: GgufHeader) -> Tokenizer:
    tokens = token_list(header)
    vocab = {token: i for i, token in enumerate(tokens)}
    stored = "tokenizer.ggml.merges" in header.metadata
    merges = _stored_merges(header) if stored else _merges_from_scores(header, tokens, vocab)
    unknown = special_ids(header).get("unk_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    header: GgufHeader, tokens: Sequence[str], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to cut a piece into two others, in
    the order of the pieces' scores; ways to cut one piece in the order of their parts' ids."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        count = None if scores is None else len(scores)
        raise FormatError(
            f"{header.path}: {count} scores in tokenizer.ggml.scores for {len(tokens)} tokens"
        )
    merges: list[tuple[float, str, str]] = []
    for token, i in vocab.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        local = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
        local.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(float(scores[i]), left, right) for left, right in local]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


def _token_types(header: GgufHeader, count: int) -> list[int]:
    types = header.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [1] * count
    if len(types) != count:
        raise FormatError(f"{header.path}: {len(types)} token types for {count} tokens")
    return [int(kind) for kind in types]


def _add_tokens(tokenizer: Tokenizer, header: GgufHeader, *, byte_level: bool) -> None:
    """Control tokens and those with a role become special, user-defined ones whole tokens.

    A byte-level vocabulary spells every real token in its alphabet; a control token that is not is
    a mislabelled one and stays in the vocabulary only.
    """
    tokens = token_list(header)
    types = _token_types(header, len(tokens))
    roles = set(special_ids(header).values())
    special, plain = [], []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not token or (byte_level and not _ALPHABET.issuperset(token)):
            continue
        if kind == _CONTROL or i in roles:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _adds(header: GgufHeader) -> tuple[bool, bool]:
    """Whether BOS and EOS are put around a text; SentencePiece models add BOS by default."""
    default = header.metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = bool(header.metadata.get("tokenizer.ggml.add_bos_token", default))
    return add_bos, bool(header.metadata.get("tokenizer.ggml.add_eos_token", False))


def _add_ends(tokenizer: Tokenizer, header: GgufHeader) -> None:
    ids, tokens = special_ids(header), token_list(header)
    add_bos, add_eos = _adds(header)
    before = [ids["bos_token_id"]] if add_bos and "bos_token_id" in ids else []
    after = [ids["eos_token_id"]] if add_eos and "eos_token_id" in ids else []
    if before or after:
        # Ids as names: a template splits its pieces at spaces and colons.
        single = [str(i) for i in before] + ["$A"] + [str(i) for i in after]
        pair = single + [str(i) for i in before] + ["$B"] + [str(i) for i in after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(single),
            pair=" ".join(pair),
            special_tokens=[
                {"id": str(i), "ids": [i], "tokens": [tokens[i]]} for i in {*before, *after}
            ],
        )


def build_tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    tokens = token_list(header)
    ids = special_ids(header)
    roles = {
        f"{role}_token": tokens[ids[f"{role}_token_id"]] if f"{role}_token_id" in ids else None
        for role in ("bos", "eos", "unk", "pad")
    }
    add_bos, add_eos = _adds(header)
    return {
        **roles,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def chat_templates(header: GgufHeader) -> dict[str, str]:
    """Templates by file name below the model directory."""
    found: dict[str, str] = {}
    for key, value in header.metadata.items():
        match = re.fullmatch(r"tokenizer\.chat_template(?:\.([A-Za-z0-9_-]{1,64}))?", key)
        if match and isinstance(value, str):
            extra = match[1] and match[1] != "default"
            name = f"additional_chat_templates/{match[1]}" if extra else "chat_template"
            found[f"{name}.jinja"] = value
    return found
