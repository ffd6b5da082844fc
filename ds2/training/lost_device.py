"""A device that is lost in the middle of a run: told as what it is, whichever call happened to notice."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds2.distributed.communicator import Communicator
from ds2.system.errors import UserError

log = logging.getLogger(__name__)
_STATUS = 2  # of errors that a user can mend


class DeviceError(UserError):
    """A device that fails every call; the message names it, where the run was, the reason and the way out."""


@contextmanager
def lost_device_is_told(comm: Communicator) -> Iterator[None]:
    """Turn an error of the block into DeviceError where it was the loss of this rank's device.

    A GPU that falls off its bus, or whose memory or kernel has failed, fails every later call, each in its own words:
    whether a call that does nothing fails too tells the loss from an error of one call. The first error's trace is
    logged, since a kernel's mistake looks the same.

    Raises:
        DeviceError: as said.
    """
    try:
        yield
    except RuntimeError as error:  # torch's of an accelerator, and those of our own kernels
        reason = why_lost(comm.device)
        if not reason:
            raise
        log.exception("%s is lost", comm.device)
        atexit.register(_end_at_once)
        raise DeviceError(
            f"{comm.device} on {comm.host} was lost at {comm.whereabouts}: {reason}. What was saved stays: start the "
            "same command again, it resumes; if it happens again, on another GPU (`nvidia-smi -q` and the system's "
            "log, `dmesg | grep Xid`, say more)"
        ) from error


def _end_at_once() -> None:
    """Leave the process to the system: torch aborts it where memory of a lost device is given back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_STATUS)


def why_lost(device: torch.device) -> str:
    """The reason that a GPU gives for failing a call that does nothing, one line; '' where it works, or is none."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
