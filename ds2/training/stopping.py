"""The early end of a run: by a signal, after a save if steps would be lost, or by the loss of its device."""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from ds2.distributed.communicator import Communicator
from ds2.system import USER_ERROR, UserError
from ds2.system.signals import Stopped, kill_workers, stop_signals

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # the same on all ranks


class Interrupts:
    """Turns stop signals into a flag that ranks agree on between steps; a second SIGINT stops at once.

    SIGUSR1 is the one that mpirun passes on to its ranks, SIGHUP that of a closed terminal, which nohup ignores. Slurm
    sends SIGTERM twice, to the ranks and through srun: only Ctrl-C, which a person repeats, means haste.
    """

    received: int = 0  # by this process
    agreed: int = 0  # received by any rank and known to all: the loop acts on it
    _sent: int = 0  # the signal that `send` returned last
    _at_once: bool = False
    _stopped: Stopped | None = None  # raised last

    def __enter__(self) -> "Interrupts":
        self._old = {s: signal.signal(s, self._handle) for s in (*stop_signals(), signal.SIGUSR1)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """The name of the signal that ranks agreed on, or ''."""
        return signal.Signals(self.agreed).name if self.agreed else ""

    def send(self) -> list[float]:
        """Return 1 for the signal that this process received, 0 for the others, to be summed over ranks."""
        self._sent = self.received
        return [float(number == self.received) for number in _SIGNALS]

    def receive(self, flags: Sequence[float], comm: Communicator) -> None:
        """Read the signals of all ranks from the sum of their flags."""
        if sum(flags) >= self._needed(comm):
            self.agreed = max(self.agreed, *(number for number, ranks in zip(_SIGNALS, flags, strict=True) if ranks))

    def agree(self, comm: Communicator) -> int:
        """Exchange signals with all ranks, which make this call together; returns `agreed`."""
        numbers = comm.allgather(max(self.received, self.agreed))
        if sum(map(bool, numbers)) >= self._needed(comm):
            self.agreed = max(numbers)
        return self.agreed

    def leave(self) -> None:
        """Raise Stopped where the others know that this process was signalled, and go on without it.

        A signal since then waits for the next step: if all left after the same one, none would save it.
        """
        if self._sent and not self.agreed:
            raise Stopped(self._sent)

    @staticmethod
    def _needed(comm: Communicator) -> int:
        """How many ranks must be signalled for all to stop: where ranks come and go, one that is signalled leaves."""
        return comm.world if comm.elastic else 1

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the block, for work that is repeated rather than saved: preparation and evaluation.

        After a save ranks must agree first, or one might end the others in the middle of the save.

        Raises:
            Stopped: in the block, or at its beginning for a signal that ranks have not agreed on.
        """
        self._at_once = True
        try:
            if self.received:
                raise Stopped(self.received)
            yield
        except Stopped:
            kill_workers()
            raise
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, self.received = self.received, number
        if self._at_once and (not before or (self._stopped and self._stopped.dropped)):
            self._stopped = Stopped(number)
            raise self._stopped
        if before == number == signal.SIGINT:
            raise KeyboardInterrupt
        if not before:
            name = signal.Signals(number).name
            log.warning("%s: saving after this step, then stopping; Ctrl-C twice stops at once", name)


@contextmanager
def report_lost_device(comm: Communicator) -> Iterator[None]:
    """Turn an error of the block into UserError where this rank's device was lost.

    A GPU that falls off its bus, or whose memory or kernel has failed, fails every later call, with various messages.
    So the device is lost if a call that does nothing fails too. The traceback of the first error is logged, since a
    fault of a kernel looks the same.

    Raises:
        UserError: the device was lost.
    """
    try:
        yield
    except RuntimeError as error:  # torch's of an accelerator, and those of our own kernels
        reason = why_lost(comm.device)
        if not reason:
            raise
        log.exception("%s is lost", comm.device)
        atexit.register(_end_at_once)
        raise UserError(
            f"{comm.device} on {comm.host} was lost at {comm.status}: {reason}. What was saved stays: start the "
            "same command again, it resumes; if it happens again, on another GPU (`nvidia-smi -q` and the system's "
            "log, `dmesg | grep Xid`, say more)"
        ) from error


def _end_at_once() -> None:
    """End without clean-up: torch aborts a process that frees memory of a lost device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(USER_ERROR)


def why_lost(device: torch.device) -> str:
    """Why a GPU fails a call that does nothing, in one line; '' if it does not fail, or for other devices."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
