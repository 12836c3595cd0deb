"""How many tokens to draft."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What the generator was asked for.

    Args:
        tokens: longest draft.
        dynamic: adapt the length to what was accepted; the other fields say how.
        skip_ema: average of accepted tokens below which a job is not drafted; 0: always drafted.
        probe_interval: rounds after which such a job is tried again.
        record: keep figures in `job.draft_stats`.
    """

    tokens: int
    dynamic: bool = False
    alpha_up: float = 1.30
    alpha_down: float = 0.65
    skip_ema: float = 0.3
    probe_interval: int = 16
    record: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("num_draft_tokens", self.tokens),
            ("dynamic_draft_probe_interval", self.probe_interval),
        ):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 1")
        for name, alpha in (("up", self.alpha_up), ("down", self.alpha_down)):
            if not 0 < alpha < 2:  # beyond, the average would not settle
                raise ConfigError(
                    f"dynamic_draft_alpha_{name} is {alpha}, expected a number between 0 and 2"
                )
        if not self.skip_ema >= 0:
            raise ConfigError(
                f"dynamic_draft_skip_ema is {self.skip_ema}, expected a number of at least 0"
            )


class DraftLength:
    """The length that one job wishes, from what was accepted before."""

    def __init__(self, options: DraftOptions) -> None:
        self.options = options
        self.ema: float | None = None  # average of accepted tokens; None before the first draft
        self._skipped = 0  # rounds in a row

    def next(self, ready: bool = True) -> int:
        """The wish for this round, to be asked in each; 0: no draft.

        Args:
            ready: there is something to propose. If not, a trial that is due waits until there is.
        """
        options, longest = self.options, self.options.tokens
        skipping = options.dynamic and self.ema is not None and self.ema < options.skip_ema
        self._skipped = self._skipped + 1 if skipping else 0
        if not ready:
            return 0
        if skipping:
            if self._skipped < options.probe_interval:
                return 0
            self._skipped = 0
            return min(2, longest)
        if not options.dynamic or self.ema is None:
            return longest
        return max(1, min(longest, math.ceil(self.ema)))

    def update(self, window: int, accepted: int) -> None:
        """Take note of a draft of `window` tokens, the first `accepted` of which were kept."""
        count = accepted + (accepted == window)
        if self.ema is None:
            self.ema = float(count)
            return
        up = count > self.ema
        weight = self.options.alpha_up if up else self.options.alpha_down
        self.ema = weight * count + (1 - weight) * self.ema
