"""Chat templates against Transformers' rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tokenizers import Make
from transformers import PreTrainedTokenizerFast

from exl3.errors import ConfigError, FormatError, UnsupportedError
from exl3.tokenizer import MMEmbedding

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}\n"
        "    {% for m in messages %}\n      {% if m.role == 'user' %}\n[INST] {{ m.content|trim }}"
        "{{ system | default('') }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}\n"
        "    {% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ tools | tojson(indent=2) }}{{ pad_token is defined }}{{ unk_token }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    ),
    "macro": (
        "{%- macro show(m) %}<{{ m.role }}>{{ m['content'].split('a') | join('-') }}{% endmacro %}"
        "{%- set ns = namespace(n=0) %}{%- for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
        "{{- show(m) }}{{ ns.n }}\n{%- endfor %}{{ strftime_now('%Y') | length }}"
    ),
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": 'What is a "cat"?  日本'},
    {"role": "assistant", "content": "An animal.\n"},
    {"role": "user", "content": "Ok 🎉 "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, None]}}}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_same_as_transformers(make: Make, name: str, prompt: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = make(tokenizer_config={**config, "chat_template": TEMPLATES[name]})
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(tokenizer.config.directory) / "tokenizer.json"),
        chat_template=TEMPLATES[name],
        **config,
    )
    options: dict[str, Any] = {"tools": TOOLS, "enable_thinking": False}
    # Transformers leaves pad_token undefined where exl3 falls back to EOS.
    theirs.pad_token = tokenizer.pad_token
    expected = theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=prompt, **options
    )
    assert tokenizer.hf_render_chat_template(CHAT, prompt, **options) == expected
    ids = theirs.apply_chat_template(
        CHAT, add_generation_prompt=prompt, return_dict=False, **options
    )
    assert tokenizer.hf_chat_template(CHAT, prompt, **options).tolist() == [ids]


def test_places_of_a_template(make: Make, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    render = lambda **k: make(tokenizer_config=k).hf_render_chat_template(  # noqa: E731
        CHAT, tools=TOOLS if "tools" in k else None
    )
    assert render(chat_template=named) == "D"
    assert render(chat_template=named, tools=1) == "T"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert render(chat_template="C") == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert render(chat_template="C") == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = make(tokenizer_config={})
    assert tokenizer.hf_render_chat_template(CHAT, chat_template="rag") == "R"
    assert tokenizer.hf_render_chat_template(CHAT, chat_template="{{ messages | length }}") == "4"


def test_continue_final_message(make: Make) -> None:
    tokenizer = make(tokenizer_config={"chat_template": CHATML})
    chat = [*CHAT, {"role": "assistant", "content": "It is "}]
    text = tokenizer.hf_render_chat_template(chat, False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    with pytest.raises(ConfigError, match="excludes"):
        tokenizer.hf_render_chat_template(chat, True, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "error", "words"),
    [
        (None, ConfigError, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", ConfigError, "roles must alternate"),
        ("{% if %}", FormatError, "chat template"),
        ("{{ messages[0]['content'] + 1 }}", ConfigError, "failed"),
        ("{{ ''.__class__.__mro__ }}", ConfigError, "refused"),
        ("{{ messages.append(1) }}", ConfigError, "refused"),
    ],
)
def test_bad_templates(make: Make, template: str | None, error: type, words: str) -> None:
    tokenizer = make(tokenizer_config={"chat_template": template} if template else {})
    with pytest.raises(error, match=words):
        tokenizer.hf_render_chat_template(CHAT)


def test_python_functions_as_tools_are_refused(make: Make) -> None:
    tokenizer = make(tokenizer_config={"chat_template": "x"})
    with pytest.raises(UnsupportedError, match="JSON schemas"):
        tokenizer.hf_render_chat_template(CHAT, tools=[len])


def test_images(make: Make) -> None:
    template = "{% for m in messages %}{{ m.content }}<tool>{% endfor %}"
    tokenizer = make(tokenizer_config={"chat_template": template})
    images = [MMEmbedding(torch.zeros(2, 4)), MMEmbedding(torch.zeros(1, 4))]
    with pytest.raises(ValueError, match="image_token_id is None"):
        tokenizer.hf_chat_template(CHAT[:2], embeddings=images)
    tokenizer.config.image_token_id = tokenizer.single_id("<tool>")
    ids = tokenizer.hf_chat_template(CHAT[:2], embeddings=images).flatten().tolist()
    assert [i for i in ids if i >= 10**9] == images[0].token_list + images[1].token_list
    with pytest.raises(ValueError, match="4 image placeholders"):
        tokenizer.hf_chat_template(CHAT, embeddings=images)
