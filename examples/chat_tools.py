"""Commands of `chat.py` that do something with an answer, or make a prompt to test a model."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chat import Chat

SANDBOX_SECONDS = 20
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_OUTPUT_CHARS = 20_000

QUESTIONS = (
    "A bat and a ball cost 1.10 together; the bat costs 1.00 more. What does the ball cost?",
    "Name three prime numbers between 20 and 40.",
    "Why is the sky blue? One sentence.",
    "Write a Python function that reverses the words of a sentence.",
    "Which weighs more, a kilogram of iron or a kilogram of feathers?",
)
CAT_PROMPT = (
    "Draw a cat that sits on a window sill and looks at the moon, as an SVG of 400 x 400 units. "
    "Answer with one code block that holds the SVG and nothing else."
)
_HAY = (
    "The river was low that morning and the boats lay on the mud.",
    "Nobody remembered who had planted the row of poplars behind the mill.",
    "A train passed at a quarter past nine, as it did every day except Sunday.",
    "In the shop window stood a globe, two clocks and a stuffed heron.",
    "The letter had been folded so often that it came apart in the hand.",
    "Rain fell on the far side of the hill and the road stayed dry.",
    "She counted the steps to the tower again and came to another number.",
    "The baker closed early because the flour had not come.",
)


def find_svg(text: str) -> str | None:
    """The last drawing of a text."""
    found = _SVG.findall(text)
    return found[-1] if found else None


def open_svg(text: str) -> Path | None:
    """Write the last drawing of a text to a temporary file and open it; None if there is none."""
    svg = find_svg(text)
    if svg is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".svg", delete=False, encoding="utf-8") as file:
        file.write(svg)
    webbrowser.open(Path(file.name).as_uri())
    return Path(file.name)


def last_python(text: str) -> str | None:
    """The last code block of a text that is Python, or says nothing of its language."""
    blocks = [code for language, code in _FENCE.findall(text) if language in ("", "py", "python")]
    return blocks[-1] if blocks else None


class Sandbox:
    """Runs a Python program away from the user's files, as far as this system can do it.

    `bwrap` gives it a read-only view of the system and no network; `unshare` no network. Always: an
    empty folder, an empty environment, an isolated interpreter, limits on time, memory and files.
    """

    def __init__(self) -> None:
        self.tool = next((name for name in ("bwrap", "unshare") if self._works(name)), None)

    @property
    def protection(self) -> str:
        """What holds the program back, for people."""
        if self.tool == "bwrap":
            return "read-only files, no network"
        files = "it can read and write your files"
        return f"no network, but {files}" if self.tool else f"{files} and use the network"

    def run(self, code: str, seconds: int = SANDBOX_SECONDS) -> str:
        """What the program printed, and how it ended if not well."""
        with tempfile.TemporaryDirectory(prefix="exl3-chat-") as folder:
            script = Path(folder) / "program.py"
            script.write_text(code, encoding="utf-8")
            command = [*self._prefix(self.tool, folder), sys.executable, "-I", str(script)]
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env={"PATH": "/usr/bin:/bin", "HOME": folder, "PYTHONIOENCODING": "utf-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    preexec_fn=_limits(seconds),
                )
            except subprocess.TimeoutExpired as error:
                said = (error.stdout or b"").decode("utf-8", "replace")
                return f"{said[:_OUTPUT_CHARS]}\n(stopped after {seconds} s)"
        said = done.stdout.decode("utf-8", "replace")[:_OUTPUT_CHARS]
        return said if done.returncode == 0 else f"{said}\n(exit status {done.returncode})"

    @classmethod
    def _works(cls, tool: str) -> bool:
        if shutil.which(tool) is None:
            return False
        command = [*cls._prefix(tool, tempfile.gettempdir()), "/bin/true"]
        return subprocess.run(command, capture_output=True).returncode == 0

    @staticmethod
    def _prefix(tool: str | None, folder: str) -> list[str]:
        if tool == "bwrap":
            base = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
            return [*base, "--bind", folder, folder, "--unshare-all", "--die-with-parent", "--"]
        return ["unshare", "--map-root-user", "--net", "--"] if tool == "unshare" else []


def _limits(seconds: int) -> Callable[[], None] | None:
    """A function for the child: limits on processor time, memory and the size of files. Processor
    time is for what outlives its parent: the parent's own clock stops it first."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None

    def apply() -> None:
        for what, most in (
            (resource.RLIMIT_CPU, seconds * (os.cpu_count() or 1) + 2),
            (resource.RLIMIT_AS, 4 << 30),
            (resource.RLIMIT_FSIZE, 64 << 20),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))

    return apply


def needle_prompt(chat: Chat, tokens: int) -> tuple[str, str]:
    """A long text with one odd sentence in it and a question about that; and the answer.

    Args:
        tokens: length of the text, about.
    """
    number = str(random.randint(10_000, 99_999))
    needle = f"The number of the locker at the station is {number}."
    per_sentence = chat.tokenizer.num_tokens(" ".join(_HAY)) / len(_HAY)
    hay = [random.choice(_HAY) for _ in range(max(1, round(tokens / per_sentence)))]
    hay.insert(random.randint(0, len(hay)), needle)
    question = "What is the number of the locker at the station? Answer with the number."
    return " ".join(hay) + "\n\n" + question, number


def read_questions(path: Path) -> list[str]:
    """Questions of a file: a JSON list, JSON lines, or text with one a line.

    Raises:
        ValueError: it has none.
    """
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        items = whole if isinstance(whole, list) else [whole]
    except ValueError:
        items = [_line(line) for line in text.splitlines() if line.strip()]
    questions = [q for q in map(_question, items) if q]
    if not questions:
        raise ValueError(f"{path}: no questions in it")
    return questions


def _line(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return line.strip()


def _question(item: object) -> str | None:
    if isinstance(item, dict):
        item = next((item[key] for key in ("question", "prompt", "instruction") if key in item), "")
    return item if isinstance(item, str) else None
