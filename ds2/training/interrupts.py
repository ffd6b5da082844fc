"""Signals that end a run: flags that ranks agree on, so that all of them save and stop after one step."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType

log = logging.getLogger(__name__)


class Interrupts:
    """Turns SIGINT, SIGTERM or SIGUSR1 into a flag that ranks agree on between steps; a second SIGINT stops at once.

    SIGUSR1 is the one that mpirun passes on to its ranks. Slurm sends SIGTERM twice, to the ranks and through srun:
    only Ctrl-C, which a person repeats, means haste.
    """

    received: int = 0  # by this process
    agreed: int = 0  # by any rank, known to all: what the loop acts on

    def __enter__(self) -> Interrupts:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._old = {s: signal.signal(s, self._handle) for s in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:
            name = signal.Signals(number).name
            log.warning("%s: saving after this step, then stopping; Ctrl-C twice stops at once", name)
        self.received = number
