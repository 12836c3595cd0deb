"""The tokenizer against the `tokenizers` library and the rules of the interface."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, TEXT, FakeConfig, Make
from tokenizers import Tokenizer as HfTokenizer

from exl3 import Config
from exl3.errors import ConfigError, FormatError, ShapeError, UnsupportedError
from exl3.tokenizer import MMEmbedding, StreamDecoder, Tokenizer
from exl3.tokenizer.pieces import PieceRules

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"
SAMPLES = [
    *TEXT[:4],
    "",
    " ",
    "\n",
    "  leading",
    "trailing  ",
    "<s>x</s>",
    "a<tool>b",
    "a <tool> b",
]
ONE_FOLDER = HealthCheck.function_scoped_fixture


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_library(make: Make, kind: str) -> None:
    tokenizer = make(kind)
    library: HfTokenizer = tokenizer.tokenizer
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        expected = library.encode(text, add_special_tokens=False).ids
        assert ids.dtype == torch.long
        assert ids.tolist() == [expected]
        for special in (False, True):
            decoded = tokenizer.decode(ids, decode_special_tokens=special)
            assert decoded == [library.decode(expected, skip_special_tokens=not special)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, suppress_health_check=[ONE_FOLDER])
@given(data=st.data())
def test_streamed_equals_decoded(make: Make, kind: str, data: st.DataObject) -> None:
    tokenizer = cached(make, kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.actual_vocab_size + 3), max_size=30))
    special = data.draw(st.booleans())
    whole = tokenizer.piece_table.decode(ids, decode_special=special)
    stream = StreamDecoder(tokenizer, decode_special_tokens=special)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        # Every prefix that was shown stays: no U+FFFD that the whole text lacks.
        assert whole.startswith(shown)
    shown += stream.flush()
    assert shown == whole


_made: dict[str, Tokenizer] = {}


def cached(make: Make, kind: str) -> Tokenizer:
    if kind not in _made:
        _made[kind] = make(kind)
    return _made[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, suppress_health_check=[ONE_FOLDER])
@given(text=st.text(max_size=40))
def test_any_text(make: Make, kind: str, text: str) -> None:
    tokenizer = cached(make, kind)
    expected = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == [expected]
    decoded = tokenizer.decode(torch.tensor([expected], dtype=torch.long))[0]
    assert decoded == tokenizer.tokenizer.decode(expected)
    if kind == "byte_level":
        assert decoded == text
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, expected)) + stream.flush() == decoded


def test_stream_holds_incomplete_characters(make: Make) -> None:
    for kind in ("byte_level", "spm"):
        tokenizer = make(kind)
        ids = tokenizer.encode("é🤖").flatten().tolist()
        stream = StreamDecoder(tokenizer)
        held = []
        for token in ids:
            stream.push(token)
            held.append(stream.held)
        assert any(held)
        assert not held[-1]


def test_stream_leading_space(make: Make) -> None:
    tokenizer = make("spm")
    ids = tokenizer.encode("The dog").flatten().tolist()
    for at_start, expected in ((True, "The dog"), (False, " The dog")):
        stream = StreamDecoder(tokenizer, at_start=at_start)
        assert "".join(map(stream.push, ids)) + stream.flush() == expected


def test_lone_surrogates_become_replacement_characters(make: Make) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == ["a\ufffdb"]
    assert tokenizer.decode(tokenizer.encode("\ud83c\udf89")) == ["🎉"]


def test_padding_and_offsets(make: Make) -> None:
    tokenizer = make(pad_token_id=0)
    ids, offsets = tokenizer.encode(["the dog", "", "the"], return_offsets=True)
    width = ids.shape[1]
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, -width, tokenizer.num_tokens("the") - width]
    assert ids[1].tolist() == [0] * width
    assert tokenizer.decode(ids) == ["the dog", "", "the"]
    mask = tokenizer.padding_mask(ids)
    assert mask.dtype == torch.float16
    assert torch.equal(mask == float("-inf"), ids == 0)
    single, offset = tokenizer.encode("the", return_offsets=True)
    assert offset.tolist() == [0]
    assert tokenizer.encode("").shape == (1, 0)
    assert tokenizer.encode([]).shape == (0, 0)
    assert tokenizer.decode(single[0]) == "the"
    assert tokenizer.decode([single, ids[0]]) == ["the", "the dog"]


def test_padding_that_is_also_eos_or_bos(make: Make) -> None:
    tokenizer = make(pad_token_id=2, eos_token_id=2, bos_token_id=1)
    the = tokenizer.encode("the").flatten().tolist()
    assert tokenizer.decode(torch.tensor([[2, 2, *the, 2]]), decode_special_tokens=True) == [
        "the</s>"
    ]
    assert tokenizer.decode(torch.tensor([[2]]), decode_special_tokens=True) == ["</s>"]
    tokenizer = make(pad_token_id=1, eos_token_id=2, bos_token_id=1)
    assert tokenizer.decode(torch.tensor([1, 1, *the]), True) == "<s>the"


def test_no_padding_token(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make(bos_token_id=2, eos_token_id=2)
    assert tokenizer.pad_token_id == -1
    assert tokenizer.pad_token == ""
    with caplog.at_level(logging.WARNING):
        ids, offsets = tokenizer.encode(["the", "the dog jumps"], return_offsets=True)
    assert ids[0, 0] == 0
    assert offsets[0] < 0
    assert "padded with id 0" in caplog.text


def test_ends(make: Make) -> None:
    tokenizer = make("spm")
    plain = tokenizer.encode("the").flatten().tolist()
    encode = lambda *a, **k: tokenizer.encode(*a, **k).flatten().tolist()  # noqa: E731
    assert encode("the", add_bos=True, add_eos=True) == [1, *plain, 2]
    assert encode("the", encode_special_tokens=True) == [1, *plain]
    assert encode("the", add_bos=True, encode_special_tokens=True) == [1, *plain]
    assert encode("<s>the", encode_special_tokens=True)[:2] == [1, *plain][:2]
    assert encode("<s>the", add_bos=True)[:2] == [1, 1]
    image = MMEmbedding(torch.zeros(2, 4))
    mixed = encode(
        f"the{image.text_alias}the", add_bos=True, encode_special_tokens=True, embeddings=[image]
    )
    assert mixed.count(1) == 1
    assert mixed[0] == 1


def test_special_tokens_in_text(make: Make) -> None:
    tokenizer = make()
    ids = tokenizer.encode("<|im_start|>the<|im_end|>").flatten().tolist()
    assert ids == [3, *tokenizer.encode("the").flatten().tolist(), 4]
    assert tokenizer.decode(torch.tensor(ids)) == "the"
    assert tokenizer.decode(torch.tensor(ids), True) == "<|im_start|>the<|im_end|>"
    literal = tokenizer.encode("<|im_start|>the", literal_special=True).flatten().tolist()
    assert 3 not in literal
    assert tokenizer.decode(torch.tensor(literal)) == "<|im_start|>the"


def test_added_token_that_is_not_special(make: Make) -> None:
    tokenizer = make()
    tool = tokenizer.single_id("<tool>")
    assert tool is not None
    for flag in (False, True):
        ids = tokenizer.encode("<tool>", encode_special_tokens=flag)
        assert ids.tolist() == [[tool]]
        assert tokenizer.decode(ids, decode_special_tokens=flag) == ["<tool>"]
    assert tokenizer.get_id_to_piece_list()[tool] == "<tool>"
    assert tokenizer.extended_id_to_piece[tool] == "<tool>"
    assert tokenizer.extended_piece_to_id["<s>"] == 1


def test_special_token_only_in_tokenizer_config(make: Make) -> None:
    number = 1000  # far above tokenizer.json: a gap of ids
    tokenizer = make(
        "spm",
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": "<|end|>",
            "added_tokens_decoder": {str(number): {"content": "<|end|>", "special": True}},
        },
    )
    assert tokenizer.actual_vocab_size == number + 1
    assert tokenizer.eos_token_id == number
    assert tokenizer.eos_token == "<|end|>"
    assert number not in tokenizer.encode("the<|end|>").flatten().tolist()
    ids = tokenizer.encode("the<|end|> dog<|end|>", encode_special_tokens=True)
    assert (ids == number).sum() == 2
    assert tokenizer.decode(ids) == ["the  dog"]  # the library's own rule after a token
    assert "<|end|>" in tokenizer.decode(ids, decode_special_tokens=True)[0]
    pieces = tokenizer.get_id_to_piece_list(True)
    assert len(pieces) == number + 1
    assert pieces[number] == "<|end|>"
    assert pieces[number - 1] == ""
    assert tokenizer.decode(torch.tensor([5000, 10**9, -1, number - 1])) == ""
    image = MMEmbedding(torch.zeros(1, 4), token_string=torch.tensor([[number, -1, number]]))
    mixed = tokenizer.encode(image.text_alias, embeddings=[image]).flatten().tolist()
    assert mixed[-3:] == image.token_list


@pytest.mark.parametrize(
    ("tokenizer_config", "config", "expected"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, {}, (1, 2, 2, None)),
        ({"bos_token": None, "eos_token": None}, {}, (None, None, -1, None)),
        ({}, {}, (1, 2, 2, None)),
        ({}, {"eos_token_id": 4}, (1, 4, 4, None)),
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": 2}, (1, 2, 2, None)),
        ({"eos_token": {"content": "<|im_end|>"}, "unk_token": "<unk>"}, {}, (1, 4, 4, 0)),
        ({"pad_token": "<|im_start|>"}, {"bos_token_id": 0}, (0, 2, 3, None)),
        ({"pad_token": "<|im_start|>"}, {"pad_token_id": 0}, (1, 2, 0, None)),
    ],
)
def test_special_ids(make: Make, tokenizer_config: dict, config: dict, expected: tuple) -> None:
    tokenizer = make(tokenizer_config=tokenizer_config, **config)
    assert (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    ) == expected


def test_config_gains_eos_ids(make: Make) -> None:
    tokenizer = make(
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [2, None, 3]},
        eos_token_id=2,
        eos_token_id_list=[2],
    )
    assert tokenizer.eos_token_id == 2
    assert tokenizer.config.eos_token_id == 4
    assert tokenizer.config.eos_token_id_list == [2, 4, 3]


def test_fallback_eos_leaves_the_config(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = make(tokenizer_config={})
    assert tokenizer.eos_token_id == 2
    assert tokenizer.config.eos_token_id is None
    assert tokenizer.config.eos_token_id_list == []
    assert "eos_token" in caplog.text


def test_tables(make: Make) -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        pieces = tokenizer.get_id_to_piece_list()
        assert pieces is tokenizer.get_id_to_piece_list() is tokenizer.id_to_piece
        assert len(pieces) == len(tokenizer.get_id_to_ord_list()) == tokenizer.actual_vocab_size
        assert pieces[1] == ""
        assert tokenizer.get_id_to_piece_list(True)[1] == "<s>"
        assert tokenizer.single_id("<s>") == 1
        assert tokenizer.single_id("no such piece") is None
        assert tokenizer.single_token(7).tolist() == [[7]]
        assert tokenizer.get_vocab_dict()["<s>"] == 1
        expected = [i for i, p in enumerate(pieces) if p.startswith(" the") and i > 4]
        found = tokenizer.get_tokens_with_prefix_string(" the")
        assert found == expected
        if expected:
            assert tokenizer.get_tokens_with_prefix_id(tokenizer.single_id(pieces[expected[0]]))
        assert tokenizer.newline_token_id == tokenizer.encode("\n")[0, -1]
    with pytest.raises(ConfigError, match="id 99999"):
        tokenizer.get_tokens_with_prefix_id(99999)


def test_byte_values(make: Make) -> None:
    tokenizer = make("byte_level")
    ords = tokenizer.get_id_to_ord_list()
    assert sorted(o for o in ords if o >= 0) == list(range(256))
    partial = ords.index(0xF0)
    starting = tokenizer.get_tokens_with_prefix_id(partial)
    assert partial in starting
    assert len(starting) > 1  # pieces of the emoji in the training text
    spm = make("spm")
    assert spm.get_id_to_ord_list()[3 + 0x0A] == 10
    assert spm.single_id("T") != 3 + ord("T")  # the piece, not the byte token


def test_embeddings(make: Make) -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        a = MMEmbedding(torch.zeros(3, 4))
        b = MMEmbedding(torch.zeros(1, 4), text_alias=a.text_alias[:-2] + "9$>")
        assert b.first_index == a.last_index
        text = f"the{a.text_alias}{b.text_alias}dog{a.text_alias}"
        ids = tokenizer.encode(text, embeddings=[a, b]).flatten().tolist()
        images = [i for i in ids if i >= 10**9]
        assert images == a.token_list + b.token_list + a.token_list
        assert ids[-3:] == a.token_list
        assert "the" in tokenizer.decode(torch.tensor(ids))
        literal = tokenizer.encode(text, embeddings=[a, b], literal_special=True)
        assert [i for i in literal.flatten().tolist() if i >= 10**9] == images


def test_mm_embedding_shapes() -> None:
    image = MMEmbedding(torch.zeros(2, 8), token_string=torch.tensor([[5, -1, -1, 6]]))
    assert image.full_length == 4
    assert image.mm_length == 2
    assert image.token_list == [5, image.first_index, image.first_index + 1, 6]
    assert image.last_index - image.first_index == 2
    assert image.text_alias == f"<$EMB_{image.first_index}$>"
    assert MMEmbedding(imp={"mm_length": 3}).mm_length == 3
    with pytest.raises(ShapeError, match="1 positions of -1"):
        MMEmbedding(torch.zeros(2, 8), token_string=torch.tensor([[5, -1]]))
    with pytest.raises(ShapeError, match="mm_length"):
        MMEmbedding(torch.zeros(8))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing"):
        Tokenizer(FakeConfig(str(tmp_path)))
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(ConfigError, match=r"there is tokenizer\.model"):
        Tokenizer(FakeConfig(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer(FakeConfig(str(tmp_path)))


def test_stored_truncation_and_padding_are_ignored(
    tmp_path: Path, hf_tokenizers: dict[str, str]
) -> None:
    stored = HfTokenizer.from_str(hf_tokenizers["byte_level"])
    stored.enable_truncation(2)
    stored.enable_padding(length=4)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(FakeConfig(str(tmp_path)))
    assert tokenizer.decode(tokenizer.encode(TEXT[0])) == [TEXT[0]]


def test_unknown_decoder_is_named() -> None:
    with pytest.raises(UnsupportedError, match="WordPiece"):
        PieceRules({"type": "WordPiece"})
    with pytest.raises(UnsupportedError, match="no decoder"):
        PieceRules(None)


def test_invalid_bytes_keep_the_valid_ones(make: Make) -> None:
    tokenizer = make("spm")
    ids = [3 + byte for byte in b"\xc3\xa9\xff\xf0\x9f"]
    assert tokenizer.decode(torch.tensor(ids)) == "é\ufffd\ufffd"
    stream = StreamDecoder(tokenizer)
    assert [stream.push(i) for i in ids] == ["", "é", "\ufffd", "", ""]
    assert stream.flush() == "\ufffd"


def test_with_the_real_config() -> None:
    config = Config.from_directory(GOLDEN)
    tokenizer = Tokenizer.from_config(config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert config.eos_token_id_list == [1]


def test_golden_model() -> None:
    config = FakeConfig(str(GOLDEN), bos_token_id=0, eos_token_id=1)
    tokenizer = Tokenizer(config)
    assert json.loads((GOLDEN / "config.json").read_text())["vocab_size"] == 512
    assert tokenizer.actual_vocab_size <= 512
    text = "Hello, wörld! 🎉"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=True)) == [text]
