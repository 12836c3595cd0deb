"""Chat templates: jinja2 in a sandbox, with what Hugging Face templates expect to find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, FormatError, UnsupportedError
from ..util.file import read_json, storage_errors

TEMPLATE_NAME = "chat_template.jinja"
_JSON_TEMPLATE_NAME = "chat_template.json"
_EXTRA_DIRECTORY = "additional_chat_templates"
_MAX_TEMPLATE_BYTES = 4 << 20


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes `<`, `>` and `&` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def read_templates(directory: str | Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """All chat templates of a model by name; the usual one is `default`.

    A file of its own comes before the entry in tokenizer_config.json, as in Transformers.
    """
    folder = Path(directory)
    found: dict[str, str] = {}
    entry = tokenizer_config.get("chat_template")
    if (folder / _JSON_TEMPLATE_NAME).is_file():
        entry = read_json(folder / _JSON_TEMPLATE_NAME).get("chat_template", entry)
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, Mapping):
        found.update({str(k): v for k, v in entry.items() if isinstance(v, str)})
    elif isinstance(entry, Sequence):
        for item in entry:
            if not isinstance(item, Mapping) or not {"name", "template"} <= set(item):
                raise FormatError(f"{folder}: chat_template list items need a name and a template")
            found[str(item["name"])] = str(item["template"])
    files = {"default": folder / TEMPLATE_NAME}
    files.update({file.stem: file for file in sorted((folder / _EXTRA_DIRECTORY).glob("*.jinja"))})
    for name, file in files.items():
        if file.is_file():
            found[name] = _read_text(file)
    return found


def _read_text(file: Path) -> str:
    with storage_errors(file, "read"):
        data = file.read_bytes()
    if len(data) > _MAX_TEMPLATE_BYTES:
        raise FormatError(f"{file}: {len(data)} bytes, expected at most {_MAX_TEMPLATE_BYTES}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: not UTF-8 text ({error})") from error


class ChatTemplates:
    """The templates of one model; compiled when first used.

    Args:
        sources: template text by name.
        special_tokens: `bos_token` and the like, passed to every template.
        where: the model directory, for error messages.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, where: str
    ) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: `role` and `content` (and what else the template reads), oldest first.
            chat_template: name of a template, or template text; default: the model's own
                (`tool_use` if there is one and `tools` are given).
            continue_final_message: end the text inside the last message, to be continued.
            variables: passed to the template: `tools`, `documents`, `enable_thinking`...
        Raises:
            ConfigError: no template, or it does not accept these messages.
            FormatError: the template cannot be parsed.
        """
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message excludes add_generation_prompt")
        tools = variables.get("tools")
        if any(callable(tool) for tool in tools or ()):
            raise UnsupportedError("tools: expected JSON schemas as dicts, got Python functions")
        template = self._template(chat_template, bool(tools))
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            text = template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **context
            )
        except TemplateError as error:
            raise ConfigError(f"{self._where}: the chat template refused: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self._where}: the chat template failed: {error!r}") from error
        return _cut_final(text, messages) if continue_final_message else text

    def _template(self, wanted: str | None, tools: bool) -> Template:
        if wanted is None:
            wanted = "tool_use" if tools and "tool_use" in self.sources else "default"
            if wanted not in self.sources:
                known = f" (it has {', '.join(self.sources)})" if self.sources else ""
                raise ConfigError(
                    f"{self._where}: no chat template{known}; give one as chat_template, or "
                    f"write the prompt yourself"
                )
        source = self.sources.get(wanted, wanted)
        if source not in self._compiled:
            try:
                self._compiled[source] = _environment().from_string(source)
            except TemplateError as error:
                raise FormatError(f"{self._where}: chat template: {error}") from error
        return self._compiled[source]


def _cut_final(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut the text after the content of the last message."""
    content = messages[-1]["content"]
    if not isinstance(content, str):
        content = content[-1]["text"]
    final = content.strip()
    place = text.rfind(final)
    if place < 0:
        raise ConfigError("continue_final_message: the template does not show the last message")
    # Space at the end of the content is kept if the template kept it.
    end = place + len(final)
    tail = content[len(content.rstrip()) :]
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]
