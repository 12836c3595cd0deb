"""Progress of a conversion: a bar with the time left, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_LINE_SECONDS = 20.0


class Progress:
    """Counts weights, which take about equal time each. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._total = self._done = self._started_at = 0
        self._label = ""
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int, *, done: int = 0) -> None:
        """Begin counting; `done` was finished by an earlier run."""
        self._total, self._done, self._started_at = total, done, done
        self._start = time.monotonic()
        self._last_line = -_LINE_SECONDS
        if self.console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=max(total, 1), completed=done, left="")
            self._bar.start()

    def count_from_here(self) -> None:
        """What was done since the start, such as a pass over the whole model, took time that says
        nothing of the time left."""
        self._start = time.monotonic()

    def step(self, label: str) -> None:
        """A module begins."""
        self._label = label
        self._show()

    def advance(self, weights: int) -> None:
        """So many weights are done."""
        self._done += weights
        self._show()

    def seconds_left(self) -> float | None:
        """Estimated from this run's speed; None before there is one."""
        worked = self._done - self._started_at
        if worked <= 0:
            return None
        return (time.monotonic() - self._start) / worked * (self._total - self._done)

    def _show(self) -> None:
        left = self.seconds_left()
        text = "" if left is None else f"{clock(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, description=self._label, completed=self._done, left=text)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            share = self._done / self._total if self._total else 1.0
            self.console.print(f"{share:4.0%}  {self._label}  {text}", highlight=False)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
