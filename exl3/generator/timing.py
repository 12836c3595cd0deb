"""How long a job waited, read its prompt and generated."""

from __future__ import annotations

import time


class Timing:
    """Seconds per phase, summed over rounds."""

    def __init__(self) -> None:
        self.enqueued = self.prefill = self.generate = 0.0
        self._mark = 0.0
        self._phase = ""

    def running(self) -> float:
        """Seconds since the present phase began."""
        return time.perf_counter() - self._mark

    def to(self, phase: str) -> None:
        """Enter a phase: `enqueued`, `prefill`, `generate` or `` for none."""
        now = time.perf_counter()
        if self._phase:
            setattr(self, self._phase, getattr(self, self._phase) + now - self._mark)
        self._mark, self._phase = now, phase
