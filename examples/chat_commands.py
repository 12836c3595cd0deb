"""Slash commands of `chat.py`."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chat_session import DEFAULT_FILE
from chat_tools import (
    CAT_PROMPT,
    QUESTIONS,
    Sandbox,
    last_python,
    needle_prompt,
    open_svg,
    read_questions,
)

if TYPE_CHECKING:
    from chat import Chat


class CommandError(Exception):
    """Shown as one line."""


Command = Callable[["Chat", str], str | None]
COMMANDS: dict[str, tuple[Command, str]] = {}


def command(name: str, text: str) -> Callable[[Command], Command]:
    def note(function: Command) -> Command:
        COMMANDS[name] = (function, text)
        return function

    return note


def run_command(chat: Chat, line: str) -> str | None:
    """Run `/name argument`; returns a prompt to answer, if the command made one."""
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        raise CommandError(f"unknown command /{name}; /h lists them")
    return COMMANDS[name][0](chat, argument.strip())


@command("h", "this help")
def _help(chat: Chat, _: str) -> None:
    for name, (_function, text) in COMMANDS.items():
        chat.say(f"/{name:<10} {text}")


@command("x", "exit")
def _exit(chat: Chat, _: str) -> None:
    raise EOFError


@command("clear", "forget the conversation")
def _clear(chat: Chat, _: str) -> None:
    chat.session.turns.clear()


@command("r", "answer the last prompt again")
def _repeat(chat: Chat, _: str) -> str:
    if not chat.session.turns:
        raise CommandError("there is nothing to repeat")
    return chat.session.turns.pop()[0]


@command("e", "edit the last answer and let the model go on from there")
def _edit(chat: Chat, argument: str) -> None:
    if not chat.session.turns:
        raise CommandError("there is no answer to edit")
    user, answer = chat.session.turns[-1]
    edited = argument or chat.keyboard.edit(answer)
    chat.session.turns[-1] = (user, edited)
    chat.go_on()


@command("sp", "show or set the system prompt; /sp - removes it")
def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.session.system_prompt = "" if argument == "-" else argument
    chat.say(f"system prompt: {chat.session.system_prompt or '(none)'}")


@command("ban", "ban a string, or list banned strings; /ban - removes all")
def _ban(chat: Chat, argument: str) -> None:
    if argument == "-":
        chat.session.banned.clear()
    elif argument:
        chat.session.banned.append(argument)
    chat.say(f"banned: {chat.session.banned or '(none)'}")


@command("think", "switch reasoning on or off")
def _think(chat: Chat, _: str) -> None:
    chat.session.think = not chat.session.think
    chat.say(f"reasoning is {'on' if chat.session.think else 'off'}")


@command("tps", "switch the speed line on or off")
def _speed(chat: Chat, _: str) -> None:
    chat.args.show_tps = not chat.args.show_tps
    chat.say(f"speed line is {'on' if chat.args.show_tps else 'off'}")


@command("mli", "switch multi-line input on or off")
def _multiline(chat: Chat, _: str) -> None:
    chat.args.multiline = not chat.args.multiline
    state = f"on; {chat.keyboard.sends} sends" if chat.args.multiline else "off"
    chat.say(f"multi-line input is {state}")


@command("probs", "show the n most likely tokens of each step; 0 switches it off")
def _probs(chat: Chat, argument: str) -> None:
    chat.args.probs = _number(argument, "probs")
    chat.say(f"shows the {chat.args.probs} most likely tokens")


@command("t", "show the conversation as tokens")
def _tokens(chat: Chat, _: str) -> None:
    if not chat.session.turns:
        raise CommandError("the conversation is empty")
    pieces = chat.tokenizer.get_id_to_piece_list(True)
    ids = chat.session.prompts()[0].flatten().tolist()
    chat.say(" ".join(f"{i}:{pieces[i]!r}" for i in ids))
    chat.say(f"{len(ids)} tokens")


@command("n", "n K PROMPT: K answers to one prompt, side by side")
def _many(chat: Chat, argument: str) -> None:
    count, _, prompt = argument.partition(" ")
    if not prompt.strip():
        raise CommandError("use /n K PROMPT")
    chat.many(_number(count, "n"), prompt.strip())


@command("save", "save the session to a file")
def _save(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser() if argument else DEFAULT_FILE
    chat.session.save(path)
    chat.say(f"saved to {path}")


@command("load", "load a session from a file")
def _load(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser() if argument else DEFAULT_FILE
    chat.session.load(path)
    chat.say(f"loaded {len(chat.session.turns)} turns from {path}")


@command("save_ids", "save the conversation's token ids as JSON")
def _save_ids(chat: Chat, argument: str) -> None:
    if not chat.session.turns:
        raise CommandError("the conversation is empty")
    path = Path(argument or "chat_ids.json").expanduser()
    path.write_text(json.dumps(chat.session.prompts()[0].flatten().tolist()))
    chat.say(f"saved to {path}")


@command("cc", "copy the n-th code block of the last answer, counted from its end")
def _copy(chat: Chat, argument: str) -> None:
    blocks = chat.session.code_blocks()
    number = _number(argument, "cc") if argument else 1
    if not 1 <= number <= len(blocks):
        raise CommandError(f"the last answer has {len(blocks)} code blocks")
    data = base64.b64encode(blocks[-number].encode()).decode()
    chat.console.file.write(f"\x1b]52;c;{data}\x07")  # the terminal puts it on the clipboard
    chat.say(f"copied {len(blocks[-number].splitlines())} lines")


@command("svg", "open the last drawing (SVG) of the answer")
def _svg(chat: Chat, _: str) -> None:
    path = open_svg(chat.session.last_answer())
    if path is None:
        raise CommandError("the last answer has no <svg>")
    chat.say(f"opened {path}")


@command("python", "run the last code block of the answer in a sandbox")
def _python(chat: Chat, _: str) -> None:
    code = last_python(chat.session.last_answer())
    if code is None:
        raise CommandError("the last answer has no Python code block")
    chat.say(code, "none")
    sandbox = Sandbox()
    if not chat.keyboard.confirm(f"run these lines ({sandbox.protection})?"):
        chat.say("not run")
        return
    chat.say(sandbox.run(code).rstrip() or "(no output)", "none")


@command("b", "ask a random test question, or one of a FILE (JSON, JSON lines or text)")
def _question(chat: Chat, argument: str) -> str:
    source = read_questions(Path(argument).expanduser()) if argument else QUESTIONS
    question = random.choice(source)
    chat.say(f"> {question}")
    return question


@command("nihs", "nihs N: find one odd sentence in a text of N tokens")
def _needle(chat: Chat, argument: str) -> str:
    prompt, answer = needle_prompt(chat, _number(argument, "nihs"))
    chat.say(f"-- {chat.tokenizer.num_tokens(prompt)} tokens; the answer is {answer}")
    return prompt


@command("cat", "ask for the drawing of a cat; /svg opens it")
def _cat(chat: Chat, _: str) -> str:
    chat.say(f"> {CAT_PROMPT}")
    return CAT_PROMPT


@command("gm", "show figures of the cache")
def _metrics(chat: Chat, _: str) -> None:
    table = chat.generator.pagetable
    chat.say(f"pages: {table.max_pages}, free: {table.num_free}, {table.metrics}")


@command("ppt", "show the page table")
def _pages(chat: Chat, _: str) -> None:
    chat.say(chat.generator.pagetable.dump_page_list())


def _number(text: str, name: str) -> int:
    if not text.isdecimal():
        raise CommandError(f"/{name} needs a whole number, got {text!r}")
    return int(text)
