"""Signals that end a run: at once where nothing would be lost, else flags on which ranks agree, to save first."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from ds2.distributed.communicator import Communicator
from ds2.system.signals import Stopped

log = logging.getLogger(__name__)

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """Turns SIGINT, SIGTERM or SIGUSR1 into a flag that ranks agree on between steps; a second SIGINT stops at once.

    SIGUSR1 is the one that mpirun passes on to its ranks. Slurm sends SIGTERM twice, to the ranks and through srun:
    only Ctrl-C, which a person repeats, means haste.
    """

    received: int = 0  # by this process
    agreed: int = 0  # by any rank, known to all: what the loop acts on
    _at_once: bool = False

    def __enter__(self) -> Interrupts:
        self._old = {s: signal.signal(s, self._handle) for s in _NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """Of the signal that ranks agreed on, or ''."""
        return signal.Signals(self.agreed).name if self.agreed else ""

    @property
    def flags(self) -> list[float]:
        """1 for the signal that this process received, 0 for the others: what ranks may add up."""
        return [float(number == self.received) for number in _NUMBERS]

    def hear(self, flags: Sequence[float]) -> None:
        """Learn of the signals of all ranks from the sum of their flags."""
        self.agreed = max(self.agreed, *(number for number, ranks in zip(_NUMBERS, flags, strict=True) if ranks), 0)

    def agree(self, comm: Communicator) -> int:
        """Learn of the signals of all ranks, which make this call together; returns `agreed`."""
        self.agreed = max(self.agreed, *comm.allgather(self.received))
        return self.agreed

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the block, for work that is repeated rather than saved: preparation and evaluation.

        Ranks that saved before must have agreed since, lest one ends the others in the middle of that.

        Raises:
            Stopped: in the block, or at its beginning for a signal that ranks have not agreed on.
        """
        self._at_once = True
        try:
            if self.received:
                raise Stopped(self.received)
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.received = not self.received, number
        if first and self._at_once:
            raise Stopped(number)
        if first:
            name = signal.Signals(number).name
            log.warning("%s: saving after this step, then stopping; Ctrl-C twice stops at once", name)
