"""A console progress bar."""

from __future__ import annotations

from typing import Any


class ProgressBar:
    """Context manager around a bar of `count` steps; silent if `text` is None."""

    def __init__(self, text: str | None, count: int, transient: bool = True) -> None:
        self.text = text
        self.count = count
        self.transient = transient
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        if self.text is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as Remaining

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, Remaining(), transient=self.transient)
            self._bar.start()
            self._task = self._bar.add_task(self.text, total=self.count)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, value: int) -> None:
        """Show `value` steps as done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=value)

    def new_task(self, text: str, count: int) -> None:
        """Start again with another text."""
        self.text, self.count = text, count
        if self._bar is not None:
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=count)
