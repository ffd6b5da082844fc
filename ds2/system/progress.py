"""How far long work is: a bar on a terminal, a log line a minute without one; standard output stays clean."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from ds2.system.terminal import visible

log = logging.getLogger(__name__)
_EVERY_S = 60.0


class Progress:
    """Shows how much of some work is done, on the error stream.

    Args:
        what: is done, in a few words; may be changed meanwhile.
        total: amount of work; None if it is not known.
        unit: of the amounts.
        shown: False shows nothing, as on ranks past 0.
        clock: returns seconds.
    """

    def __init__(
        self,
        what: str,
        total: float | None,
        unit: str,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.shown = what, total, unit, shown
        self.done, self._clock = 0.0, clock
        self._began = self._reported_at = clock()
        self._bar = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm  # imported late: commands that end at once do without

            self._bar = tqdm(total=total, desc=visible(what), unit=f" {unit}", dynamic_ncols=True, leave=False)

    def update(self, done: float) -> None:
        """Set the amount that is done."""
        step, self.done = done - self.done, done
        if self._bar is not None:
            self._bar.set_description(visible(self.what), refresh=False)
            self._bar.update(round(step, 1))
        elif self.shown and (now := self._clock()) - self._reported_at >= _EVERY_S:
            self._reported_at = now
            log.info("%s: %s", self.what, self._line(now))

    def _line(self, now: float) -> str:
        if self.total is None or not self.done:
            return f"{self.done:.0f} {self.unit}"
        left_min = (now - self._began) / 60 * max(0.0, self.total / self.done - 1)
        return f"{self.done:.0f} of {self.total:.0f} {self.unit}, {left_min:.0f} min left"

    def clear(self) -> None:
        """Remove the bar from the terminal, until the next update, before something is printed there."""
        if self._bar is not None:
            self._bar.clear()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
