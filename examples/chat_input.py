"""Reading the keyboard for `chat.py`: lines, many lines, and Escape while an answer runs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

ESCAPE = b"\x1b"


class Keyboard:
    """Asks for prompts.

    With the package prompt_toolkit and a terminal, Alt-Enter sends many lines and lines can be
    edited; without either, an empty line sends them.
    """

    def __init__(self, console: Console, *, plain: bool) -> None:
        self.console = console
        self._session = None if plain or not sys.stdin.isatty() else _prompt_session()

    @property
    def sends(self) -> str:
        """What sends many lines, for people."""
        return "an empty line" if self._session is None else "Alt-Enter"

    def ask(self, *, multiline: bool) -> str:
        """The next prompt. Raises EOFError at the end of input."""
        if self._session is not None:
            return self._session.prompt("| " if multiline else "> ", multiline=multiline)
        if not multiline:
            return self.console.input("[bold]> [/bold]")
        lines: list[str] = []
        while line := self.console.input("[bold]| [/bold]"):
            lines.append(line)
            if len(lines) == 1 and line.startswith("/"):
                break
        return "\n".join(lines)

    def edit(self, text: str) -> str:
        """A changed text; the same if nothing is entered."""
        if self._session is not None:
            return self._session.prompt("| ", multiline=True, default=text)
        self.console.print(text, markup=False, highlight=False)
        return self.console.input("[bold]new text, to be continued: [/bold]") or text

    def confirm(self, question: str) -> bool:
        """True for a clear yes."""
        try:
            answer = self.console.input(f"{question} y/N ", markup=False)
        except EOFError:
            return False
        return answer.strip().lower() in ("y", "yes")


def _prompt_session() -> Any:
    """A prompt_toolkit session; its own key for sending many lines is Alt-Enter."""
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        return None
    return PromptSession()


@contextlib.contextmanager
def stop_watch(descriptor: int | None = None) -> Iterator[Callable[[], bool]]:
    """A function that says whether to stop: Escape or Ctrl-C was pressed.

    Ctrl-C does not break off what is running then; only a second one does, as KeyboardInterrupt.

    Args:
        descriptor: of a terminal; None: standard input. Without a terminal there is no Escape.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _frame: Any) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    try:
        before = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread
        before = None
    try:
        with _escape_watch(descriptor) as escaped:
            yield lambda: bool(interrupts) or escaped()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _escape_watch(descriptor: int | None) -> Iterator[Callable[[], bool]]:
    try:
        fd = sys.stdin.fileno() if descriptor is None else descriptor
        is_terminal = os.isatty(fd)
        import termios
        import tty
    except (ImportError, OSError, ValueError):
        is_terminal = False
    if not is_terminal:
        yield lambda: False
        return

    def pressed() -> bool:
        ready, _, _ = select.select([fd], [], [], 0)
        # Arrows and other keys send Escape and more at once.
        return bool(ready) and os.read(fd, 64) == ESCAPE

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
